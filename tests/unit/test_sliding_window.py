"""KV groups with a window: what they keep, what they give back, which hits they serve, and that a long request never
holds more than its window and the tokens in flight.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.errors import InvalidRequestError
from engine.scheduler.kv_group import KVGroupManager, make_group_manager
from tests.support.scheduler_harness import GROUPS, SchedulerHarness, make_request, sliding_group

WINDOW = 10


def names(count: int) -> list[bytes]:
    return [b"%d" % index for index in range(count)]


def make_group(
    window: int = WINDOW, extra: int = 0, num_blocks: int = 64, block_size: int = 4
) -> KVGroupManager:
    return make_group_manager(sliding_group(window, extra), num_blocks, block_size)


def keys_read(window: int, extra: int, num_computed: int) -> set[int]:
    """By the definition: of the next ten steps' queries and of the drafter after each."""
    keys: set[int] = set()
    for position in range(num_computed, num_computed + 10):
        keys |= set(range(position - window + 1, position + 1))
        keys |= set(range(position - window + 1 - extra, position + 1))
    return {key for key in keys if key >= 0}


@pytest.mark.parametrize("extra", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 7])
def test_the_first_key_is_the_oldest_that_any_later_step_reads(window: int, extra: int) -> None:
    spec = sliding_group(window, extra)
    for num_computed in range(20):
        assert spec.first_key(num_computed) == min(keys_read(window, extra, num_computed))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 6, 16, 17])
def test_the_most_blocks_are_those_of_the_worst_alignment(window: int, block_size: int) -> None:
    spec = sliding_group(window, 1)
    for num_tokens in (1, 3, 40, 1000):
        for num_unconfirmed in (1, 2, 9):
            spans = [
                (num_computed + num_unconfirmed - 1) // block_size
                - spec.first_key(num_computed) // block_size
                + 1
                for num_computed in range(200)
            ]
            expected = min(max(spans), -(-num_tokens // block_size))
            assert spec.max_held_blocks(num_tokens, num_unconfirmed, block_size) == expected


def test_a_group_without_a_window_holds_all_tokens() -> None:
    assert GROUPS[0].first_key(1000) == 0
    assert GROUPS[0].max_held_blocks(17, 1, 4) == 5


def test_blocks_behind_the_window_come_back_but_stay_findable() -> None:
    group = make_group(num_blocks=8)
    group.start("a", [], 24)
    group.grow("a", 24)
    group.publish("a", names(5), 0)
    group.slide("a", 20, 0)
    table = group.tables["a"]
    assert (table.first, table.end, group.pool.num_used, group.pool.num_cached) == (2, 6, 4, 2)
    assert all(group.pool.find(name) is not None for name in names(5))
    group.slide("a", 20, 0)
    group.slide("a", 22, 0)
    assert table.first == 3
    group.check_integrity()


def test_blocks_behind_the_window_are_fenced_by_the_steps_in_flight() -> None:
    group = make_group(num_blocks=8)
    group.start("a", [], 24)
    group.grow("a", 24)
    group.slide("a", 20, 7)
    assert (group.pool.num_available, group.pool.num_fenced) == (2, 2)
    group.pool.release(6)
    assert group.pool.num_fenced == 2
    group.pool.release(7)
    assert group.pool.num_available == 4


def test_what_a_failed_request_gave_back_before_is_not_found_either() -> None:
    group = make_group()
    group.start("a", [], 24)
    group.grow("a", 24)
    group.publish("a", names(5), 0)
    group.slide("a", 20, 0)
    group.withdraw(names(5))
    group.free("a", 0)
    assert (group.longest_hit(names(5), 5), group.pool.num_cached) == (0, 0)
    group.check_integrity()


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("window", [1, 6, 20])
def test_the_longest_hit_is_the_last_whose_window_is_cached(window: int, extra: int, block_size: int) -> None:
    generator = random.Random(window)
    for _ in range(100):
        group = make_group(window, extra, 12, block_size)
        cached = {index for index in range(12) if generator.random() < 0.8}
        for index, block in enumerate(group.pool.take(12)):
            if index in cached:
                group.pool.publish(block, b"%d" % index)

        def is_served(hit: int, cached: set[int] = cached) -> bool:
            keys = keys_read(window, extra, hit * block_size)
            return {key // block_size for key in keys if key < hit * block_size} <= cached

        for limit in range(13):
            assert group.longest_hit(names(12), limit) == max(filter(is_served, range(limit + 1)))


def make_harness(
    block_size: int, depth: int, *, num_sliding: int, num_groups: int = 1, k: int = 2, **fields: Any
) -> SchedulerHarness:
    """Sequences of ten windows fit the full groups; `num_sliding` blocks are behind the window."""
    num_full = 20 * WINDOW // block_size + 2
    return SchedulerHarness(
        block_size=block_size,
        depth=depth,
        k=k,
        num_groups=num_groups,
        num_blocks=[num_full] * num_groups + [num_sliding],
        sliding=sliding_group(WINDOW, 1),
        max_model_len=11 * WINDOW,
        max_prefill_chunk=7,
        num_right=lambda k: k // 2,
        **fields,
    )


def most_held(harness: SchedulerHarness) -> int:
    """Run to the end; the most blocks that were in use at a time in the sliding group."""
    group = next(group for group in harness.scheduler._kv._groups if group.spec.window is not None)
    most = 0
    while harness.scheduler.has_unfinished:
        plan = harness.launch()
        most = max(most, group.pool.num_used)
        if plan is None or not harness.scheduler.can_launch:
            harness.collect()
    harness.run()
    return most


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_ten_windows_hold_a_window_and_what_is_in_flight(block_size: int, depth: int) -> None:
    """At most window - 1 + 1 extra key + `depth` chunks of 7, and the blocks they can lie in."""
    harness = make_harness(block_size, depth, num_sliding=200)
    harness.add(make_request("a", [8 + index % 29 for index in range(10 * WINDOW)], max_tokens=10))
    bound = (WINDOW - 1 + 1 + depth * 7 + block_size - 2) // block_size + 1
    assert 0 < most_held(harness) <= bound < 10 * WINDOW // block_size


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_groups", [0, 1])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_ten_windows_fit_a_pool_of_one_window(block_size: int, num_groups: int, depth: int) -> None:
    """Chunks shrink to what there is room for; several requests take turns."""
    num_sliding = sliding_group(WINDOW, 1).max_held_blocks(11 * WINDOW, 1, block_size)
    harness = make_harness(block_size, depth, num_sliding=num_sliding, num_groups=num_groups)
    prompts = {f"r{index}": [8 + index] * (10 * WINDOW) for index in range(3)}
    harness.run(*[make_request(name, prompt, max_tokens=10) for name, prompt in prompts.items()])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_hit_into_the_middle_of_a_long_sequence(block_size: int, depth: int) -> None:
    """The device checks every key that is read; the blocks before the window are neither held nor sent."""
    harness = make_harness(block_size, depth, num_sliding=200)
    prompt = [8 + index % 29 for index in range(10 * WINDOW)]
    harness.run(make_request("a", prompt, max_tokens=10))
    harness.run(make_request("b", [*prompt[: 5 * WINDOW], *[9] * WINDOW], max_tokens=10))
    hit = 5 * WINDOW // block_size
    assert harness.received["b"].outputs[-1].num_cached_tokens == hit * block_size
    plan = next(plan for plan in harness.plans if plan.new_rows and plan.new_rows[0].request_id == "b")
    starts = {update.group: update.start for update in reversed(plan.block_table_updates)}
    assert starts == {0: 0, 1: (hit * block_size - WINDOW) // block_size}


def test_a_hit_ends_where_the_blocks_behind_the_window_were_handed_out_again() -> None:
    """The pool is hardly larger than what one request needs: only what it read last is left of it."""
    harness = make_harness(4, 1, num_sliding=6)
    prompt = [8 + index % 29 for index in range(10 * WINDOW)]
    harness.run(make_request("a", prompt, max_tokens=10))
    harness.run(make_request("middle", [*prompt[: 5 * WINDOW], 9], max_tokens=1))
    assert harness.received["middle"].outputs[-1].num_cached_tokens == 0
    harness.run(make_request("b", prompt, max_tokens=1))
    harness.run(make_request("again", prompt, max_tokens=10))
    assert harness.received["again"].outputs[-1].num_cached_tokens > 8 * WINDOW


def test_a_first_prefill_preempts_who_came_later_for_its_next_block() -> None:
    """Both are admitted, since a window has room, but decodes of the later one take the blocks between chunks."""
    harness = make_harness(4, 1, num_sliding=6, max_num_batched_tokens=8)
    harness.add(make_request("long", [8] * (10 * WINDOW), max_tokens=4))
    harness.step()
    harness.add(make_request("short", [9], max_tokens=40))
    harness.run()
    preemptions = {name: got.outputs[-1].num_preemptions for name, got in harness.received.items()}
    assert preemptions["long"] == 0


def test_a_request_longer_than_the_pool_of_a_window_is_accepted_and_one_longer_than_a_full_pool_is_not() -> (
    None
):
    harness = make_harness(4, 1, num_sliding=6)
    harness.run(make_request("a", [8] * (10 * WINDOW), max_tokens=10))
    tiny = make_harness(4, 1, num_sliding=2)
    with pytest.raises(InvalidRequestError, match="expected at most 7: the whole KV cache"):
        tiny.scheduler.add(make_request("a", [8] * 8))


def test_load_is_that_of_the_group_with_the_largest_share_in_use() -> None:
    harness = make_harness(4, 1, num_sliding=6)
    harness.add(make_request("a", [8] * 20, max_tokens=10))
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_blocks, stats.num_used_blocks) == (6, 2)
    harness.run()
