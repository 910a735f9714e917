"""Hits, room, table updates, publishing and freeing, over one and several groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from engine.kv_spec import KVGroupSpec
from engine.messages import RequestTimes
from engine.request import Request
from engine.scheduler.kv_manager import KVManager
from tests.support.scheduler_harness import GROUPS, FakeCutter, make_request

_rows = itertools.count()


def make(request_id: str, prompt: Sequence[int], num_groups: int = 1, **fields: object) -> Request:
    message = make_request(request_id, prompt, **fields)  # type: ignore[arg-type]
    return Request(
        request_id=request_id,
        message=message,
        cutter=FakeCutter(message, 1000),
        order=(0, 0),
        token_limit=1000,
        stop_ids=(),
        token_ids=list(prompt),
        times=RequestTimes(),
        row=next(_rows),
        kv_groups=tuple(range(num_groups)),
    )


def manager(num_blocks: int = 16, num_groups: int = 1, block_size: int = 4, cache: bool = True) -> KVManager:
    return KVManager(GROUPS[:num_groups], num_blocks, block_size, enable_prefix_cache=cache)


def compute_and_free(kv: KVManager, request: Request) -> None:
    kv.start(request, kv.find_hit(request))
    kv.commit(request, len(request.token_ids))
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


def test_without_the_cache_nothing_is_found_or_published() -> None:
    kv = manager(cache=False)
    compute_and_free(kv, make("a", range(13)))
    assert (kv.find_hit(make("b", range(13))), kv.occupancy()) == (0, (0, 0))


def test_updates_carry_the_whole_table_first_and_then_what_is_new() -> None:
    kv = manager(num_groups=2)
    compute_and_free(kv, make("a", range(9), 2))
    request = make("b", range(9), 2)
    start = kv.start(request, kv.find_hit(request))
    assert [(update.group, update.start, len(update.block_ids)) for update in start] == [(0, 0, 3), (1, 0, 3)]
    assert kv.grow(request, 12) == ()
    grown = kv.grow(request, 17)
    assert [(update.row, update.start, len(update.block_ids)) for update in grown] == [
        (request.row, 3, 2)
    ] * 2
    kv.check_integrity()


def test_shortage_counts_cached_blocks_that_a_hit_takes_out_of_the_free_ones() -> None:
    kv = manager(num_blocks=4)
    compute_and_free(kv, make("a", range(9)))
    request = make("b", [*range(8), *range(90, 98)])
    assert kv.find_hit(request) == 2
    assert kv.start_shortage(request, 2, reserve=0) == [0]
    assert kv.start_shortage(request, 2, reserve=1) == [1]
    kv.start(request, 2)
    assert kv.growth_shortage(request, 17) == [1]


def test_committing_publishes_full_blocks_of_confirmed_tokens_only() -> None:
    kv = manager()
    first = make("a", range(8))
    kv.start(first, 0)
    kv.commit(first, 7)
    assert kv.find_hit(make("b", range(12))) == 1
    kv.commit(first, 8)
    assert kv.find_hit(make("c", range(12))) == 2


def test_a_block_that_may_hold_nan_is_never_found_again() -> None:
    kv = manager()
    request = make("a", range(9))
    kv.start(request, 0)
    kv.commit(request, 9)
    kv.free(request, 0, keep_findable=False)
    assert (kv.find_hit(make("b", range(9))), kv.occupancy()) == (0, (0, 0))
    kv.check_integrity()


def test_a_window_has_no_manager_yet() -> None:
    spec = KVGroupSpec(name="w", layer_indices=(0,), num_kv_heads=1, head_size=1, bytes_per_token=1, window=8)
    with pytest.raises(AssertionError, match="window"):
        KVManager([spec], 4, 4, enable_prefix_cache=True)
