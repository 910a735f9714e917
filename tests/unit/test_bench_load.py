"""The requests of a load run and their times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import ConfigError
from server.bench.load import OutputPlan, complete, dataset_prompts, poisson_arrivals, random_prompts

PLAN = OutputPlan(output_len=7, ignore_eos=True, temperature=0.0, seed=3, speculation_method="none")


def test_arrivals_are_seeded_and_have_the_asked_rate() -> None:
    arrivals = poisson_arrivals(5000, rate=20.0, seed=1)
    assert arrivals == poisson_arrivals(5000, rate=20.0, seed=1)
    assert arrivals != poisson_arrivals(5000, rate=20.0, seed=2)
    assert arrivals[0] == 0.0
    gaps = np.diff(arrivals)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)  # exponential: deviation equals mean


def test_random_prompts_have_the_asked_length_and_stay_in_the_vocabulary() -> None:
    prompts = list(random_prompts(4, length=50, vocab_size=11, seed=5))
    ids = [list(prompt.token_ids.ids) for prompt in prompts]
    assert [len(prompt) for prompt in ids] == [50] * 4
    assert max(map(max, ids)) < 11
    assert len({tuple(prompt) for prompt in ids}) == 4
    assert ids == [list(prompt.token_ids.ids) for prompt in random_prompts(4, 50, 11, seed=5)]


def test_requests_carry_the_plan_and_a_seed_of_their_own() -> None:
    first, second = complete(random_prompts(2, 4, 11, seed=0), PLAN)
    assert (first.sampling.seed, second.sampling.seed) == (3, 4)
    assert first.sampling.HasField("temperature")
    assert first.stopping.max_tokens == 7
    assert first.stopping.ignore_eos
    assert first.speculation.method == "none"


def test_a_dataset_gives_texts_and_first_turns_and_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "raw"}\n\n{"turns": ["first", "second"], "id": 1}\n')
    prompts = list(dataset_prompts(path, 3))
    assert prompts[0].text == "raw"
    assert [message.content for message in prompts[1].chat.messages] == ["first"]
    assert prompts[2].text == "raw"


def test_a_line_of_a_dataset_ends_at_a_newline_only(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}'.encode())
    assert [prompt.text for prompt in dataset_prompts(path, 2)] == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "got no prompts"),
        ("{", r"prompts.jsonl:1: not JSON"),
        ('{"prompt": "a"}\n\n{"turns": []}', r"prompts.jsonl:3: got neither `prompt`"),
        ("[1]", "got neither `prompt`"),
    ],
)
def test_a_wrong_dataset_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(dataset_prompts(path, 1))


def test_a_missing_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(dataset_prompts(tmp_path / "none.jsonl", 1))
