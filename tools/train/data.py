"""From text files and samples to the rows that each stage learns from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tools.train.loops import loop_start
from tools.train.prompts import Prompt
from tools.train.rows import Document, Prose, Rows, pack_documents
from tools.train.samples import Sample, read_samples
from tools.train.target_task import TargetData
from tools.train.text_files import read_documents
from tools.train.tokenizer import BOS_ID, EOS_ID, TURN_END_ID, render_prompt

_PIECE = 20_000  # characters that are tokenised at a time: a book is many pieces


def target_data(
    tokenizer_folder: Path,
    text_files: Sequence[Path],
    sample_folders: Sequence[Path],
    *,
    kinds: Collection[str],
    row_length: int,
    seed: int,
) -> TargetData:
    """Prose of the text files, in an order drawn by the seed, and chats of the samples of these kinds."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    documents = read_documents(text_files)
    order = np.random.default_rng(seed).permutation(len(documents))
    prose = encode_prose(tokenizer, [documents[index] for index in order])
    samples = [sample for sample in read_samples(sample_folders) if sample.kind in kinds and _is_fit(sample)]
    chats = pack_documents(encode_chats(tokenizer, samples), row_length, seed)
    sources = {
        "text_files": [path.name for path in text_files],
        "samples": len(samples),
        "samples_by_kind": dict(Counter(sample.kind for sample in samples)),
    }
    return TargetData(prose=prose, chats=chats, row_length=row_length, sources=sources)


def _is_fit(sample: Sample) -> bool:
    """Is this something to learn to write from? Not what ends in a loop, nor what was cut off by the end of a run."""
    if Prompt(sample.kind, sample.prompt).is_held_out or sample.finish == "cut":
        return False
    return loop_start(sample.answer_ids) == len(sample.answer_ids)


def encode_prose(tokenizer: Tokenizer, documents: Iterable[str]) -> Prose:
    """<bos> document <eos>, one behind the other."""
    parts: list[np.ndarray[Any, np.dtype[np.uint16]]] = []
    for document in documents:
        pieces = [document[at : at + _PIECE] for at in range(0, len(document), _PIECE)]
        parts.append(np.array([BOS_ID], dtype=np.uint16))
        parts += [np.array(encoded.ids, dtype=np.uint16) for encoded in tokenizer.encode_batch_fast(pieces)]
        parts.append(np.array([EOS_ID], dtype=np.uint16))
    return Prose(np.concatenate(parts), BOS_ID)


def encode_chats(tokenizer: Tokenizer, samples: Sequence[Sample]) -> list[Document]:
    """In the form of the chat template; an answer that came to its end has the end of the turn behind it."""
    prompts = tokenizer.encode_batch_fast([render_prompt(sample.prompt) for sample in samples])
    answers = tokenizer.encode_batch_fast([sample.answer.strip() for sample in samples])
    documents = []
    for sample, prompt, answer in zip(samples, prompts, answers, strict=True):
        end = [TURN_END_ID] if sample.finish == "stop" else []
        documents.append(Document([*prompt.ids, *answer.ids, *end], num_context=len(prompt.ids)))
    return documents


def drafter_rows(
    sample_folders: Sequence[Path], row_length: int, seed: int, max_held_out: int
) -> tuple[Rows, Rows, dict[str, Any]]:
    """Rows of what a target wrote, in its own tokens and up to where it loops; of the greedy answers an eighth is held
    out, or `max_held_out`. Returns (training rows, held-out greedy rows, sources for the report).
    """
    samples = list(read_samples(sample_folders))
    greedy_indices = [index for index, sample in enumerate(samples) if sample.temperature == 0]
    held_out = set(greedy_indices[: min(max_held_out, len(greedy_indices) // 8)])
    training = [document_of(sample) for index, sample in enumerate(samples) if index not in held_out]
    greedy = [document_of(samples[index]) for index in sorted(held_out)]
    sources = {
        "samples": len(training),
        "samples_by_kind": dict(Counter(sample.kind for sample in samples)),
        "samples_by_temperature": dict(Counter(str(sample.temperature) for sample in samples)),
        "held_out_greedy_samples": len(greedy),
    }
    return pack_documents(training, row_length, seed), pack_documents(greedy, row_length, seed), sources


def document_of(sample: Sample) -> Document:
    answer_ids = sample.answer_ids[: loop_start(sample.answer_ids)]
    return Document([*sample.prompt_ids, *answer_ids], num_context=len(sample.prompt_ids))
