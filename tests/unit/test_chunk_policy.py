"""How much prefill a step with decodes may carry, as measurements come in."""

from __future__ import annotations

import pytest

from engine.scheduler.chunk_policy import MIN_CHUNK, UNMEASURED_CHUNK, ChunkPolicy

BUDGET = 2048


def measured(base: float, rate: float, *, stall: float = 0.05, count: int = 10) -> ChunkPolicy:
    """A policy that followed its own limits for `count` steps of that cost."""
    policy = ChunkPolicy(stall)
    run(policy, base, rate, count)
    return policy


def run(policy: ChunkPolicy, base: float, rate: float, count: int) -> list[int]:
    chunks = []
    for _ in range(count):
        chunks.append(policy.max_prefill_tokens(BUDGET))
        policy.observe(0, base)
        policy.observe(chunks[-1], base + chunks[-1] * rate)
    return chunks


def test_it_is_off_without_a_limit() -> None:
    policy = ChunkPolicy(None)
    policy.observe(100, 10.0)
    assert policy.max_prefill_tokens(BUDGET) == BUDGET


def test_it_starts_small() -> None:
    policy = ChunkPolicy(0.05)
    assert policy.max_prefill_tokens(BUDGET) == UNMEASURED_CHUNK
    assert policy.max_prefill_tokens(5) == 5
    policy.observe(0, 0.01)
    assert policy.max_prefill_tokens(BUDGET) == UNMEASURED_CHUNK, "decodes say nothing of the cost of prefill"


@pytest.mark.parametrize(("rate", "expected"), [(1e-4, 500), (1e-3, 50), (1e-2, MIN_CHUNK), (1e-6, BUDGET)])
def test_the_prefill_of_a_step_costs_about_the_stall(rate: float, expected: int) -> None:
    assert measured(0.02, rate).max_prefill_tokens(BUDGET) == pytest.approx(expected, abs=1)


def test_one_slow_step_changes_nothing() -> None:
    policy = measured(0.02, 1e-4)
    policy.observe(100, 30.0)
    policy.observe(0, 30.0)
    assert policy.max_prefill_tokens(BUDGET) == pytest.approx(500, abs=1)


def test_a_slow_first_step_is_forgotten_after_two_more() -> None:
    policy = ChunkPolicy(0.05)
    policy.observe(32, 5.0)
    assert policy.max_prefill_tokens(BUDGET) == MIN_CHUNK
    for _ in range(2):
        policy.observe(MIN_CHUNK, MIN_CHUNK * 1e-4)
    assert policy.max_prefill_tokens(BUDGET) == 64


def test_a_chunk_at_most_doubles_whatever_the_measurements_say() -> None:
    """A base that was measured too slow makes prefill look free: the next chunk must not be the whole prompt."""
    policy = ChunkPolicy(0.05)
    policy.observe(0, 10.0)
    assert run(policy, 0.0, 0.0, 4) == [32, 64, 128, 256]


def test_it_follows_a_lasting_change() -> None:
    policy = measured(0.02, 1e-4, count=20)
    run(policy, 0.02, 1e-3, 8)
    assert policy.max_prefill_tokens(BUDGET) == pytest.approx(50, abs=1)


def test_a_prefill_that_costs_nothing_measurable_is_not_limited() -> None:
    assert measured(0.02, 0.0).max_prefill_tokens(BUDGET) == BUDGET
    assert measured(0.02, -1e-5).max_prefill_tokens(BUDGET) == BUDGET
