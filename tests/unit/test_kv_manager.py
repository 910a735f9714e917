"""Hits, room, table updates, publishing and freeing, over one and several groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.draft_method import DraftMethod
from engine.request import Request
from engine.scheduler.kv_manager import KVManager
from tests.support.kv_requests import make
from tests.support.scheduler_harness import GROUPS, fed_group, sliding_group


def manager(num_blocks: int = 16, num_groups: int = 1, block_size: int = 4, cache: bool = True) -> KVManager:
    return KVManager(GROUPS[:num_groups], [num_blocks] * num_groups, block_size, enable_prefix_cache=cache)


def compute_and_free(kv: KVManager, request: Request) -> None:
    kv.start(request, kv.find_hit(request))
    kv.commit(request, len(request.token_ids), 0)
    kv.free(request, 0, keep_findable=True)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(("length", "expected"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_a_full_hit_leaves_at_least_the_last_token(length: int, expected: int, num_groups: int) -> None:
    kv = manager(num_groups=num_groups)
    compute_and_free(kv, make("a", range(length), num_groups))
    assert kv.find_hit(make("b", range(length), num_groups)) == expected


def test_a_hit_ends_at_the_first_difference() -> None:
    kv = manager()
    compute_and_free(kv, make("a", range(13)))
    assert kv.find_hit(make("b", [0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11, 12])) == 1


def test_salts_and_prompt_logprobs_do_not_hit() -> None:
    kv = manager()
    compute_and_free(kv, make("a", range(13), cache_salt="x"))
    assert kv.find_hit(make("b", range(13))) == 0
    assert kv.find_hit(make("c", range(13), cache_salt="x", prompt_logprobs=0)) == 0
    assert kv.find_hit(make("d", range(13), cache_salt="x")) == 3


def test_a_hit_is_what_all_groups_have() -> None:
    kv = manager(num_groups=2)
    compute_and_free(kv, make("a", range(13), 2))
    pool = kv._groups[1].pool
    (evicted,) = pool.take(1 + pool.num_available - pool.num_cached)[-1:]
    assert kv.find_hit(make("b", range(13), 2)) == 2, f"block {evicted}, the tail, is gone in one group"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_hit_over_mixed_groups_is_the_longest_that_all_can_serve(order: tuple[int, int]) -> None:
    """The full group has blocks 0..5; of the one with a window 2 and 5 are gone: a hit of 5 blocks would read keys
    11.. of blocks 2..4, one of 4 keys 7.. of blocks 1..3, and one of 2 the blocks 0 and 1.
    """
    groups = (GROUPS[0], sliding_group(10))
    kv = KVManager([groups[index] for index in order], [7, 7], 4, enable_prefix_cache=True)
    request = make("a", range(25), 2)
    kv.start(request, 0)
    kv.grow(request, 25)
    kv.commit(request, 24, 0)
    kv._groups[order.index(1)].withdraw([request.block_hashes[index] for index in (2, 5)])
    assert kv.find_hit(make("b", range(25), 2)) == 2


def test_without_the_cache_nothing_is_found_or_published() -> None:
    kv = manager(cache=False)
    compute_and_free(kv, make("a", range(13)))
    assert (kv.find_hit(make("b", range(13))), kv.occupancy()) == (0, (0, 0, 16))


def test_updates_carry_the_whole_table_first_and_then_what_is_new() -> None:
    kv = manager(num_groups=2)
    compute_and_free(kv, make("a", range(9), 2))
    request = make("b", range(9), 2)
    kv.start(request, kv.find_hit(request))
    start = kv.take_updates([request])
    assert [(update.group, update.start, len(update.block_ids)) for update in start] == [(0, 0, 3), (1, 0, 3)]
    kv.grow(request, 12)
    assert kv.take_updates([request]) == []
    kv.grow(request, 17)
    grown = kv.take_updates([request])
    assert [(update.row, update.start, len(update.block_ids)) for update in grown] == [
        (request.row, 3, 2)
    ] * 2
    kv.check_integrity()


def test_updates_of_a_request_that_was_freed_are_not_sent() -> None:
    kv = manager()
    first, second = make("a", range(9)), make("b", range(9))
    kv.start(first, 0)
    kv.start(second, 0)
    kv.free(first, 0, keep_findable=True)
    assert [update.row for update in kv.take_updates([first, second])] == [second.row]
    assert kv.take_updates([first, second]) == []


def test_updates_of_a_request_wait_for_its_next_step() -> None:
    """The step of others may fail, and theirs with it."""
    kv = manager()
    first, second = make("a", range(9)), make("b", range(9))
    kv.start(first, 0)
    kv.start(second, 0)
    assert [update.row for update in kv.take_updates([first])] == [first.row]
    assert [update.row for update in kv.take_updates([first, second])] == [second.row]


def test_shortage_counts_cached_blocks_that_a_hit_takes_out_of_the_free_ones() -> None:
    kv = manager(num_blocks=4)
    compute_and_free(kv, make("a", range(9)))
    request = make("b", [*range(8), *range(90, 98)])
    assert kv.find_hit(request) == 2
    assert kv.start_shortage(request, 2, reserve=[0]) == [0]
    assert kv.start_shortage(request, 2, reserve=[1]) == [1]
    kv.start(request, 2)
    assert kv.growth_shortage(request, 17) == [1]


def test_committing_publishes_full_blocks_of_confirmed_tokens_only() -> None:
    kv = manager()
    first = make("a", range(8))
    kv.start(first, 0)
    kv.commit(first, 7, 0)
    assert kv.find_hit(make("b", range(12))) == 1
    kv.commit(first, 8, 0)
    assert kv.find_hit(make("c", range(12))) == 2


def test_a_block_that_may_hold_nan_is_never_found_again() -> None:
    kv = manager()
    request = make("a", range(9))
    kv.start(request, 0)
    kv.commit(request, 9, 0)
    kv.free(request, 0, keep_findable=False)
    assert (kv.find_hit(make("b", range(9))), kv.occupancy()) == (0, (0, 0, 16))
    kv.check_integrity()


# ---- a drafter that catches up -----------------------------------------------------------------------------


def drafted(request_id: str, prompt: Sequence[int]) -> Request:
    request = make(request_id, prompt)
    request.draft_method = DraftMethod(name="d", max_drafts=2, kv_groups=(1, 2), catch_up="tokens")
    request.draft_kv_groups = (1, 2)
    return request


def drafted_manager(num_draft_blocks: int = 16) -> KVManager:
    groups = (GROUPS[0], fed_group(None), fed_group(5))
    return KVManager(groups, [16, num_draft_blocks, num_draft_blocks], 4, enable_prefix_cache=True)


@pytest.mark.parametrize(("watermark", "expected"), [(0, 0), (3, 0), (4, 1), (11, 2), (13, 3)])
def test_draft_blocks_are_found_up_to_the_watermark_and_shorten_no_hit(watermark: int, expected: int) -> None:
    kv = drafted_manager()
    first, second = drafted("a", range(17)), drafted("b", range(17))
    assert kv.start(first, 0) == 0
    kv.grow_drafter(first, 17)
    first.draft_watermark = watermark
    kv.commit(first, 17, 0)
    kv.free(first, 0, keep_findable=True)
    assert kv.find_hit(second) == 4
    assert kv.start(second, 4) == expected
    kv.check_integrity()


def test_a_drafter_holds_blocks_for_what_it_is_fed_and_its_window_at_the_watermark() -> None:
    kv = drafted_manager(num_draft_blocks=4)
    request = drafted("a", range(40))
    kv.start(request, 0)
    assert [kv._groups[index].pool.num_used for index in (0, 1, 2)] == [10, 0, 0]
    assert kv.max_draft_slots(request) == 16
    kv.grow_drafter(request, 9)
    assert [kv._groups[index].pool.num_used for index in (1, 2)] == [3, 3]
    kv.commit(request, 30, 0)
    assert kv._groups[2].tables["a"].first == 0, "keys 0.. are read when it goes on at 0"
    request.draft_watermark = 9
    kv.commit(request, 30, 0)
    assert kv._groups[2].tables["a"].first == 1, "keys 5.. are read when it goes on at 9"


def test_draft_blocks_that_may_hold_nan_are_never_found_again() -> None:
    kv = drafted_manager()
    first, second = drafted("a", range(17)), drafted("b", range(17))
    kv.start(first, 0)
    kv.grow_drafter(first, 17)
    first.draft_watermark = 16
    kv.commit(first, 16, 0)
    kv.free(first, 0, keep_findable=False)
    assert (kv.find_hit(second), kv.start(second, 0)) == (0, 0)
    assert all(group.pool.num_cached == 0 for group in kv._groups)
