"""What is saved for requests without a drafter changes nothing that anybody sees: the same trace, with an entry made
and blocks looked at in every step, brings the same outputs step by step."""

from __future__ import annotations

import random

import pytest

from engine.messages import RequestOutput
from engine.request import Request
from engine.scheduler.kv_group import KVGroupManager
from engine.stats import EngineStats, StepStats
from engine.step import ScheduledRequest
from tests.support.scheduler_harness import SchedulerHarness, make_request, sliding_group

NUM_TRACES = 50
MAX_MODEL_LEN = 40
SHARED = [8 + (7 * index) % 29 for index in range(MAX_MODEL_LEN)]  # prompts begin alike
Seen = tuple[list[RequestOutput], StepStats, EngineStats]


def harness_of(rng: random.Random, *, has_cache: bool) -> SchedulerHarness:
    block_size, k = rng.choice((1, 4, 16)), rng.choice((0, 2))
    window = rng.choice((None, None, 3, 9))
    num_full = -(-(MAX_MODEL_LEN + rng.choice((0, 8, 40))) // block_size)
    return SchedulerHarness(
        block_size=block_size,
        num_blocks=num_full,
        depth=rng.choice((1, 2)),
        k=k,
        num_right=lambda k: min(k, 1),
        has_drafter=k > 0 and rng.random() < 0.5,
        sliding=sliding_group(window) if window else None,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_cache=has_cache,
        max_num_seqs=rng.choice((1, 3, 4)),
        max_num_batched_tokens=rng.choice((2, 8, 64)),
    )


def arrive(harness: SchedulerHarness, rng: random.Random, name: str) -> None:
    message = make_request(
        name,
        SHARED[: rng.randint(1, 24)] + [rng.randrange(40)] * rng.randint(0, 3),
        max_tokens=rng.randint(1, 14),
        priority=rng.choice((0, 0, 1, 2)),
        ignore_eos=rng.random() < 0.7,
        method=rng.choice((None, "none", "none")),
    )
    if rng.random() < 0.05:
        harness.device.nan_requests.add(name)
    harness.add(message)


def run_trace(seed: int, *, has_cache: bool) -> tuple[list[Seen], list[ScheduledRequest]]:
    """What each step brought, by request, and the entries of all decodes."""
    rng = random.Random(seed)
    harness = harness_of(rng, has_cache=has_cache)
    seen: list[Seen] = []
    for index in range(60):
        if rng.random() < 0.3:
            arrive(harness, rng, f"r{index}")
        if rng.random() < 0.08 and index > 0:
            harness.abort(f"r{rng.randrange(index)}")
        while rng.random() < 0.8 and harness.launch() is not None:
            pass
        if harness.in_flight and rng.random() < 0.8:
            outputs = sorted(harness.collect(), key=lambda output: output.request_id)
            seen.append((outputs, harness.scheduler.step_stats(), harness.scheduler.stats()))
    harness.run()
    decodes = [entry for plan in harness.plans for entry in plan.scheduled if not entry.is_prefill]
    return seen, decodes


def test_entries_that_are_kept_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a prefix cache: the order of a plan decides which of equal blocks it keeps."""
    traces = [run_trace(seed, has_cache=False) for seed in range(NUM_TRACES)]
    monkeypatch.setattr(Request, "can_repeat", False)
    num_repeated = num_preempted = 0
    for seed, (seen, decodes) in enumerate(traces):
        expected, made_anew = run_trace(seed, has_cache=False)
        assert seen == expected, f"seed {seed}"
        assert len(made_anew) == len({id(entry) for entry in made_anew}) == len(decodes)
        num_repeated += len(decodes) - len({id(entry) for entry in decodes})
        num_preempted += sum(stats.num_preempted for _, stats, _ in seen)
    assert num_repeated > 1000, "these traces show nothing"
    assert num_preempted > 50, "these traces show nothing"


def test_blocks_that_are_looked_at_seldom_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [run_trace(seed, has_cache=True) for seed in range(NUM_TRACES)]
    monkeypatch.setattr(KVGroupManager, "next_commit", lambda self, num_tokens: num_tokens)
    for seed, trace in enumerate(traces):
        assert trace == run_trace(seed, has_cache=True), f"seed {seed}"
    outputs = [output for seen, _ in traces for outputs, _, _ in seen for output in outputs]
    assert sum(output.num_cached_tokens > 0 for output in outputs) > 100, "these traces show nothing"
