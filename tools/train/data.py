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
_HELD_OUT_CHATS = 256  # prompts at most, and a tenth of them
_GREEDY_SHARE = 8  # one greedy prompt of so many is held out


def target_data(
    tokenizer_folder: Path,
    text_files: Sequence[Path],
    sample_folders: Sequence[Path],
    *,
    kinds: Collection[str],
    row_length: int,
    seed: int,
) -> TargetData:
    """Prose of the text files, in an order drawn by the seed, and chats of the samples of these kinds. Of their prompts
    a tenth is held out, or 256."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    documents = read_documents(text_files)
    order = np.random.default_rng(seed).permutation(len(documents))
    prose = encode_prose(tokenizer, [documents[index] for index in order])
    samples = [sample for sample in read_samples(sample_folders) if sample.kind in kinds and _is_fit(sample)]
    training, held_out = hold_out(samples, samples, _HELD_OUT_CHATS, 10)
    chats, held_out_chats = (
        pack_documents(encode_chats(tokenizer, part), row_length, seed) for part in (training, held_out)
    )
    sources = {
        "text_files": [path.name for path in text_files],
        "samples": len(samples),
        "samples_by_kind": dict(Counter(sample.kind for sample in samples)),
    }
    return TargetData(
        prose=prose, chats=chats, held_out_chats=held_out_chats, row_length=row_length, sources=sources
    )


def hold_out(
    samples: Sequence[Sample], candidates: Sequence[Sample], most: int, share: int
) -> tuple[list[Sample], list[Sample]]:
    """(what is learned from, what is held out) of the samples: of the candidates' prompts one in `share`, `most` at
    most, evenly over them, and whatever was answered to those. A prompt comes again and again: an answer that is held
    out without it would be known, a greedy one word by word.
    """
    prompts = list(dict.fromkeys(map(_prompt_of, candidates)))
    count = min(most, len(prompts) // share)
    chosen = {prompts[index * len(prompts) // count] for index in range(count)}
    training = [sample for sample in samples if _prompt_of(sample) not in chosen]
    return training, [sample for sample in samples if _prompt_of(sample) in chosen]


def _prompt_of(sample: Sample) -> tuple[str, tuple[int, ...]]:
    return sample.prompt, tuple(sample.prompt_ids)


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
    """Rows of what a target wrote, in its own tokens and up to where it loops; of the prompts with a greedy answer an
    eighth is held out, or `max_held_out`. Returns (training rows, held-out greedy rows, sources for the report). Raises
    ValueError where either would be empty: the best model is chosen by its held-out drafts.
    """
    samples = list(read_samples(sample_folders))
    training, held_out = hold_out(
        samples, [sample for sample in samples if sample.temperature == 0], max_held_out, _GREEDY_SHARE
    )
    greedy = {_prompt_of(sample): sample for sample in held_out if sample.temperature == 0}
    if not greedy:
        raise ValueError(
            f"samples: got fewer than {_GREEDY_SHARE} prompts with a greedy answer, expected more, of which some are "
            "held out (sample --greedy-share)"
        )
    sources = {
        "samples": len(training),
        "samples_by_kind": dict(Counter(sample.kind for sample in training)),
        "samples_by_temperature": dict(Counter(str(sample.temperature) for sample in training)),
        "held_out_greedy_samples": len(greedy),
    }
    rows, greedy_rows = (
        pack_documents(map(document_of, part), row_length, seed) for part in (training, greedy.values())
    )
    if not len(rows) or not len(greedy_rows):
        raise ValueError(f"samples: got no prompts shorter than a row of {row_length} tokens, expected some")
    return rows, greedy_rows, sources


def document_of(sample: Sample) -> Document:
    answer_ids = sample.answer_ids[: loop_start(sample.answer_ids)]
    return Document([*sample.prompt_ids, *answer_ids], num_context=len(sample.prompt_ids))
