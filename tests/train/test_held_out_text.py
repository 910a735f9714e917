"""What a model is looked at on is nothing that it learned from, also where a prompt came again, and never nothing."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.training_bench import ROW_LENGTH, Workbench
from tools.train.data import drafter_rows, hold_out, target_data
from tools.train.evaluate import prompt_sets, read_speculator
from tools.train.rows import Rows
from tools.train.samples import Sample, SampleWriter

NUM_PROMPTS = 100


def answer(prompt: int, temperature: float, length: int = 6) -> Sample:
    """The prompt is the token 100 + `prompt`; an answer has small ones."""
    return Sample(
        kind="story",
        prompt=f"prompt {prompt}",
        answer=f"answer to {prompt}",
        prompt_ids=[1, 100 + prompt],
        answer_ids=[2 + (prompt + place) % 40 for place in range(length)],
        temperature=temperature,
        finish="stop",
    )


def asked_again() -> list[Sample]:
    """Each prompt three times, twice greedily; short answers come first, as when they are sampled."""
    samples = [
        answer(prompt, temperature) for prompt in range(NUM_PROMPTS) for temperature in (0.0, 0.0, 0.8)
    ]
    random.Random(0).shuffle(samples)
    return samples


def write(samples: Sequence[Sample], folder: Path) -> Path:
    writer = SampleWriter(folder, "text")
    for sample in samples:
        writer.add(sample)
    writer.flush()
    return folder


def prompts_in(rows: Rows) -> set[int]:
    return {token - 100 for token in set(rows.token_ids.flatten().tolist()) if token >= 100}


def test_a_prompt_is_held_out_with_all_its_answers_evenly_over_the_text() -> None:
    samples = asked_again()
    training, held_out = hold_out(samples, samples, most=8, share=8)
    held_out_prompts = {sample.prompt for sample in held_out}
    assert len(held_out_prompts) == 8
    assert not held_out_prompts & {sample.prompt for sample in training}
    assert (len(training), len(held_out)) == (3 * (NUM_PROMPTS - 8), 3 * 8)
    order = list(dict.fromkeys(sample.prompt for sample in samples))
    places = sorted(order.index(prompt) for prompt in held_out_prompts)
    assert places == [index * NUM_PROMPTS // 8 for index in range(8)]
    assert hold_out(samples[:3], samples[:3], most=8, share=8) == (samples[:3], [])


def test_a_drafter_is_looked_at_on_prompts_that_it_does_not_learn_from(tmp_path: Path) -> None:
    rows, greedy, sources = drafter_rows([write(asked_again(), tmp_path)], 32, seed=0, max_held_out=96)
    assert not prompts_in(rows) & prompts_in(greedy)
    assert len(prompts_in(greedy)) == sources["held_out_greedy_samples"] == NUM_PROMPTS // 8
    assert greedy.num_learned == 6 * (NUM_PROMPTS // 8), "each of them once"
    assert (
        sources["samples"] == sum(sources["samples_by_kind"].values()) == 3 * (NUM_PROMPTS - NUM_PROMPTS // 8)
    )


def test_a_target_is_looked_at_on_prompts_that_it_does_not_learn_from(tmp_path: Path) -> None:
    bench = Workbench(tmp_path)
    data = target_data(
        tmp_path / "tokenizer",
        [bench.text],
        [write(asked_again(), tmp_path / "again")],
        kinds=["story"],
        row_length=ROW_LENGTH,
        seed=0,
    )
    assert len(data.held_out_chats)

    def documents(rows: Rows) -> set[tuple[int, ...]]:
        """All that begin in these rows, without the padding."""
        found = set()
        for token_ids, positions in zip(rows.token_ids.tolist(), rows.positions.tolist(), strict=True):
            starts = [place for place, position in enumerate(positions) if position == 0] + [len(positions)]
            found |= {tuple(token_ids[a:b]) for a, b in itertools.pairwise(starts) if b > a + 1}
        return found

    assert documents(data.held_out_chats)
    assert not documents(data.chats) & documents(data.held_out_chats)


@pytest.mark.parametrize(
    ("samples", "row_length", "message"),
    [
        ([answer(prompt, 0.8) for prompt in range(40)], 32, "fewer than 8 prompts with a greedy answer"),
        ([answer(0, 0.0)] * 40, 32, "fewer than 8 prompts with a greedy answer"),
        ([answer(prompt, 0.0) for prompt in range(40)], 2, "no prompts shorter than a row of 2 tokens"),
    ],
)
def test_a_drafter_without_anything_to_look_at_is_refused(
    samples: list[Sample], row_length: int, message: str, tmp_path: Path
) -> None:
    """Else the first model would be kept, as no later one could be better."""
    with pytest.raises(ValueError, match=message):
        drafter_rows([write(samples, tmp_path)], row_length, seed=0, max_held_out=96)


def test_a_target_without_enough_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Workbench(tmp_path)
    bench.text.write_text("one two three")
    with pytest.raises(AssertionError):
        bench.train_target("target", 2)
    assert f"expected more than a row of {ROW_LENGTH}" in capsys.readouterr().err
    bench.text.write_text("one two three " * 60)
    bench.samples = write([answer(0, 0.8)], tmp_path / "few")
    with pytest.raises(AssertionError):
        bench.train_target("target", 2)
    assert "fewer than ten prompts" in capsys.readouterr().err


def test_text_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Workbench(tmp_path)
    bench.train_target("target", 2)
    samples = write([answer(prompt + 300, 0.0) for prompt in range(40)], tmp_path / "foreign")
    with pytest.raises(AssertionError):
        bench.train_assistant("assistant", 2, samples)
    assert "another model wrote them" in capsys.readouterr().err


def test_an_evaluation_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected --prompts or --held-out"):
        prompt_sets([], 4, held_out=False, seed=0)
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question": "Why?"}))
    with pytest.raises(ValueError, match="got a line with question, expected one with turns"):
        prompt_sets([path], 4, held_out=False, seed=0)
    with pytest.raises(ValueError, match="expected METHOD"):
        read_speculator("eagle3,model", 4)
