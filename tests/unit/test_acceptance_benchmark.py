"""benchmarks/acceptance.py: from answers to figures, on made-up times."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.acceptance import (
    AUTO,
    PLAIN,
    Answer,
    Plan,
    Variant,
    acceptance,
    comparisons,
    fastest,
    prompt_sets,
    rates,
    share_equal_to_plain,
)
from benchmarks.inprocess import Streamed
from benchmarks.prompt_sets import Prompt
from engine.errors import ConfigError
from engine.stats import SpecObservation

PLAN = Plan(num_prompts=4, max_tokens=16, ks=(2, 4))
NGRAM = Variant("ngram", 4)
TOKENS = [7] * 11


def observation(num_accepted: int, method: str = "ngram") -> SpecObservation:
    return SpecObservation(
        method=method,
        num_drafted=4,
        num_verifier_accepted=num_accepted,
        num_accepted=num_accepted,
        num_emitted=num_accepted + 1,
    )


def answer(
    variant: Variant,
    seconds: float,
    *seen: SpecObservation,
    pair: int = 0,
    task: str = "qa",
    token_ids: list[int] = TOKENS,
) -> Answer:
    streamed = Streamed(token_ids=token_ids, first_at=5.0, last_at=5.0 + seconds, observations=list(seen))
    return Answer(Prompt("bench", task, f"{task} {pair}"), pair, variant, streamed)


def test_a_rate_is_all_tokens_of_a_pair_over_all_its_seconds_without_first_tokens() -> None:
    answers = [
        answer(PLAIN, 1.0),
        answer(PLAIN, 3.0, task="sum"),
        answer(PLAIN, 5.0, pair=1),
        answer(NGRAM, 0.1),
    ]
    assert rates(answers, PLAIN) == pytest.approx([20 / 4, 10 / 5])


def test_the_fastest_variant_is_found_over_all_pairs() -> None:
    other = Variant("suffix", 2)
    answers = [answer(NGRAM, 1.0), answer(NGRAM, 9.0, pair=1), answer(other, 2.0), answer(other, 2.0, pair=1)]
    assert fastest(answers, [NGRAM, other]) == other


def test_every_variant_is_compared_with_plain_and_auto_with_the_best_fixed_one() -> None:
    seconds = dict.fromkeys(PLAN.variants, 2.0) | {NGRAM: 1.0, AUTO: 1.25}
    answers = [answer(variant, seconds[variant], pair=pair) for variant in PLAN.variants for pair in range(7)]
    ratios = {(found.a, found.b): found.ratio_median for found in comparisons("bench", answers, PLAN)}
    assert ratios == pytest.approx(
        {
            ("plain", "ngram k=2"): 1.0,
            ("plain", "ngram k=4"): 2.0,
            ("plain", "suffix k=2"): 1.0,
            ("plain", "suffix k=4"): 1.0,
            ("plain", "auto"): 1.6,
            ("best fixed (ngram k=4)", "auto"): 0.8,
        }
    )


def test_acceptance_is_by_set_and_task_and_by_the_method_that_drafted() -> None:
    answers = [
        answer(PLAIN, 1.0),
        answer(NGRAM, 1.0, observation(4), observation(1)),
        answer(NGRAM, 1.0, observation(0), task="sum"),
        answer(AUTO, 1.0, observation(2, "suffix"), observation(3)),
    ]
    lengths = {
        case: {report.method: report.acceptance_length for report in reports}
        for case, reports in acceptance("bench", answers).items()
    }
    assert lengths == {
        "bench, ngram k=4": {"ngram": pytest.approx(8 / 3)},
        "bench/qa, ngram k=4": {"ngram": pytest.approx(3.5)},
        "bench/sum, ngram k=4": {"ngram": pytest.approx(1.0)},
        "bench, auto": {"ngram": 4.0, "suffix": 3.0},
        "bench/qa, auto": {"ngram": 4.0, "suffix": 3.0},
    }


def test_texts_are_compared_with_the_plain_one_of_the_same_prompt() -> None:
    answers = [
        answer(PLAIN, 1.0),
        answer(PLAIN, 1.0, pair=1),
        answer(NGRAM, 1.0),
        answer(NGRAM, 1.0, pair=1, token_ids=[1, 2, 3]),
    ]
    assert share_equal_to_plain(answers) == 0.5


def test_a_set_with_fewer_prompts_than_pairs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"turns": ["only one"]}\n')
    with pytest.raises(ConfigError, match="set few: got 1 prompts, expected one for each of 7 pairs"):
        prompt_sets([path], PLAN, num_pairs=7, seed=0)
