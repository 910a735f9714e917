"""Requests without a drafter decode by one entry while their slots last, and the books go on as if each step had made
its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.kv_spec import KVGroupSpec
from engine.scheduler.kv_group import make_group_manager
from engine.step import ScheduledRequest
from tests.support.scheduler_harness import SchedulerHarness, make_request

_THRESHOLD = """\
import gc
from engine.garbage import MAX_YOUNG, spare_what_is_loaded

spare_what_is_loaded()
assert gc.isenabled() and gc.get_threshold()[0] == MAX_YOUNG
"""


def decodes(harness: SchedulerHarness) -> list[ScheduledRequest]:
    return [entry for plan in harness.plans for entry in plan.scheduled if not entry.is_prefill]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_entry_is_made_once_a_block(depth: int) -> None:
    harness = SchedulerHarness(block_size=4, depth=depth)
    harness.run(make_request("a", [8] * 4, max_tokens=13))
    entries = decodes(harness)
    assert len(entries) == 12
    assert [entry.max_seq_len for entry in entries] == [8] * 4 + [12] * 4 + [16] * 4
    assert len({id(entry) for entry in entries}) == 3


def test_no_entry_goes_beyond_the_tokens_that_need_kv() -> None:
    harness = SchedulerHarness(block_size=16)
    harness.run(make_request("a", [8] * 4, max_tokens=6))
    assert [entry.max_seq_len for entry in decodes(harness)] == [9] * 5


def test_a_preempted_request_decodes_by_a_new_entry() -> None:
    """Its blocks are others then."""
    harness = SchedulerHarness(max_num_seqs=1)
    harness.add(make_request("low", [8] * 5, priority=1, max_tokens=10))
    for _ in range(3):
        harness.step()
    harness.add(make_request("urgent", [9] * 5, max_tokens=3))
    harness.run()
    assert harness.scheduler.stats().num_preemptions_total == 1
    resumed = next(plan.step for plan in harness.plans if plan.new_rows and plan.step > 5)
    before = [entry for plan in harness.plans if plan.step < resumed for entry in plan.scheduled]
    after = [entry for plan in harness.plans if plan.step >= resumed for entry in plan.scheduled]
    assert not {id(entry) for entry in before} & {id(entry) for entry in after}


@pytest.mark.parametrize("depth", [1, 2])
def test_who_has_slots_left_gives_its_blocks_to_one_before_it(depth: int) -> None:
    """`a` takes the last block; `c`, which needs none yet, is preempted for `b`."""
    harness = SchedulerHarness(block_size=4, num_blocks=7, depth=depth, enable_prefix_cache=False)
    harness.add(
        make_request("a", [8] * 8, max_tokens=9),
        make_request("b", [9] * 8, max_tokens=9),
        make_request("c", [10] * 5, max_tokens=9),
    )
    while harness.scheduler.stats().num_preemptions_total == 0:
        harness.step()
    running = [request.request_id for request in harness.scheduler._running]
    assert running == ["a", "b"]
    harness.run()


def test_drafting_requests_have_an_entry_a_step() -> None:
    harness = SchedulerHarness(k=2, num_right=lambda k: 1)
    harness.run(make_request("a", [8] * 4, max_tokens=9))
    entries = decodes(harness)
    assert len({id(entry) for entry in entries}) == len(entries)


@pytest.mark.parametrize("window", [None, 1, 5, 6, 9])
@pytest.mark.parametrize("block_size", [2, 4])
def test_nothing_is_missed_between_two_commits(window: int | None, block_size: int) -> None:
    spec = KVGroupSpec(
        name="g", layer_indices=(0,), num_kv_heads=1, head_size=1, bytes_per_token=1, window=window
    )
    group = make_group_manager(spec, 8, block_size)

    def due(num_tokens: int) -> tuple[int, int]:
        """Blocks to publish and to give back."""
        return num_tokens // block_size, spec.first_key(num_tokens) // block_size

    for num_tokens in range(40):
        following = group.next_commit(num_tokens)
        assert following > num_tokens
        assert all(due(later) == due(num_tokens) for later in range(num_tokens, following))


def test_a_process_that_serves_collects_seldom() -> None:
    subprocess.run([sys.executable, "-c", _THRESHOLD], check=True, timeout=60)
