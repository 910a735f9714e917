"""Prompts, sampled text on disk, text files and the tokenizer with its chat form."""

from __future__ import annotations

import gzip
import itertools
import lzma
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tools.train.prompts import HELD_OUT_SHARE, PromptSource, questions_of
from tools.train.recipes import TEXT_KINDS
from tools.train.samples import Sample, SampleWriter, read_samples
from tools.train.text_files import read_documents
from tools.train.tokenizer import (
    BOS_ID,
    SPECIAL_TOKENS,
    TURN_END_ID,
    render_prompt,
    train_tokenizer,
    write_tokenizer,
)

SUMS = ["What is 1 + 1?", "How many legs have two dogs?"]
PASSAGES = [" ".join(f"word{number}" for number in range(900))]


def sample(number: int) -> Sample:
    return Sample(
        kind="story",
        prompt=f"prompt {number}",
        answer="answer",
        prompt_ids=[1, number],
        answer_ids=[2],
        temperature=0.8,
        finish="stop",
    )


def test_prompts_are_of_all_kinds_and_repeatable() -> None:
    prompts = [
        list(itertools.islice(PromptSource(3, TEXT_KINDS, SUMS, PASSAGES).take(held_out=False), 400))
        for _ in range(2)
    ]
    assert prompts[0] == prompts[1]
    assert {prompt.kind for prompt in prompts[0]} == set(TEXT_KINDS)
    assert len({prompt.text for prompt in prompts[0]}) > 300


def test_held_out_prompts_are_never_trained_on() -> None:
    training = itertools.islice(PromptSource(0, TEXT_KINDS).take(held_out=False), 2000)
    held_out = itertools.islice(PromptSource(1, TEXT_KINDS).take(held_out=True), 2000 // HELD_OUT_SHARE)
    assert not {prompt.text for prompt in training} & {prompt.text for prompt in held_out}


def test_kinds_without_their_text_are_left_out() -> None:
    prompts = itertools.islice(PromptSource(0, {"sums": 1.0, "story": 1.0}).take(held_out=False), 20)
    assert {prompt.kind for prompt in prompts} == {"story"}


def test_questions_are_taken_from_questions_with_answers() -> None:
    assert questions_of(["Question: One?\nAnswer: Two.", "prose"]) == ["One?"]


def test_samples_come_back_in_order_and_new_ones_go_behind(tmp_path: Path) -> None:
    for start in (0, 5):
        writer = SampleWriter(tmp_path, "run", samples_per_file=2)
        for number in range(start, start + 5):
            writer.add(sample(number))
        writer.flush()
    assert [item.prompt_ids[1] for item in read_samples([tmp_path])] == list(range(10))
    assert len(list(tmp_path.glob("*.gz"))) == writer.num_files == 6


def test_an_unfinished_file_is_not_read(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, "run", samples_per_file=2)
    for number in range(3):
        writer.add(sample(number))
    (tmp_path / "run-001.jsonl.partial").write_bytes(gzip.compress(b"{"))
    assert len(list(read_samples([tmp_path]))) == 2
    with pytest.raises(FileNotFoundError, match="expected sampled text"):
        list(read_samples([tmp_path / "nowhere"]))


def test_documents_are_read_from_plain_and_compressed_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\n\n<|endoftext|>two")
    with lzma.open(tmp_path / "b.txt.xz", "wt") as file:
        file.write("three")
    assert read_documents([tmp_path / "a.txt", tmp_path / "b.txt.xz"]) == ["one", "two", "three"]


def test_the_tokenizer_has_the_chat_form_that_training_uses(tmp_path: Path) -> None:
    write_tokenizer(train_tokenizer(["the quick brown fox", "12 foxes"] * 20, 300), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": " 12 foxes? "}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == render_prompt("12 foxes?")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == BOS_ID
    assert ids.count(TURN_END_ID) == 1
    assert tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == list(SPECIAL_TOKENS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n12 foxes?\nmodel\n"
