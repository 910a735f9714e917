"""Blocks: who gets which, in which order, and when a freed one may be handed out again."""

from __future__ import annotations

import pytest

from engine.scheduler.block_pool import BlockPool


def test_all_blocks_are_handed_out_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(2) + pool.take(3)) == [0, 1, 2, 3, 4]
    assert (pool.num_available, pool.num_used) == (0, 5)


def test_freed_blocks_wait_for_the_steps_in_flight() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    pool.free(blocks[:1], fence_step=4)
    pool.free(blocks[1:], fence_step=5)
    assert (pool.num_available, pool.num_fenced, pool.num_used) == (0, 3, 0)
    pool.release(4)
    assert pool.take(1) == blocks[:1]
    pool.release(5)
    assert pool.num_available == 2
    pool.free(blocks[:1], fence_step=5)
    assert pool.num_available == 3, "nothing is in flight: no fence"


def test_a_freed_block_is_found_by_its_hash_until_it_is_handed_out() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.publish(block, b"a")
    pool.free([block], fence_step=0)
    assert (pool.find(b"a"), pool.num_cached, pool.num_available) == (block, 1, 1)
    pool.take(1)
    assert (pool.find(b"a"), pool.num_cached) == (None, 0)


def test_empty_blocks_go_first_then_the_tail_of_the_oldest_chain() -> None:
    pool = BlockPool(5)
    first, second = pool.take(2), pool.take(2)
    for index, block in enumerate(first + second):
        pool.publish(block, bytes([index]))
    pool.free(first, fence_step=0)
    pool.free(second, fence_step=0)
    (empty,) = set(range(5)) - set(first + second)
    assert pool.take(5) == [empty, first[1], first[0], second[1], second[0]]


def test_sharing_a_cached_block_takes_it_out_of_the_eviction_order() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.free(blocks, fence_step=0)
    pool.share(blocks[1])
    assert (pool.num_available, pool.is_available(blocks[1])) == (1, False)
    assert pool.take(1) == [blocks[0]]
    assert pool.find(bytes([blocks[1]])) == blocks[1]


def test_a_shared_block_comes_back_with_its_last_holder() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.publish(blocks[0], b"a")
    pool.share(blocks[0])
    pool.free(blocks, fence_step=0)
    assert pool.num_used == 1
    pool.free(blocks, fence_step=0)
    assert pool.num_used == 0


def test_a_block_shared_while_fenced_keeps_only_its_newest_fence() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.publish(blocks[0], b"a")
    pool.free(blocks, fence_step=1)
    pool.share(blocks[0])
    pool.release(1)
    assert pool.num_used == 1
    pool.free(blocks, fence_step=2)
    pool.check_integrity([])
    assert pool.num_available == 0
    pool.release(2)
    assert pool.num_available == 1
    pool.check_integrity([])


def test_a_block_freed_twice_behind_one_fence_is_released_once() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.publish(blocks[0], b"a")
    pool.free(blocks, fence_step=1)
    pool.share(blocks[0])
    pool.free(blocks, fence_step=1)
    pool.release(1)
    pool.check_integrity([])
    assert pool.num_available == 1


def test_the_first_block_with_a_content_keeps_the_name() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find(b"a") == first
    pool.free([first, second], fence_step=0)
    assert pool.num_cached == 1
    pool.check_integrity([])


def test_a_withdrawn_block_is_not_found() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.publish(blocks[0], b"a")
    pool.withdraw(blocks[0])
    assert pool.find(b"a") is None
    pool.free(blocks, fence_step=0)
    pool.check_integrity([])


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.free(blocks, fence_step=0)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks, fence_step=0)


def test_the_integrity_check_sees_a_holder_that_the_pool_does_not_know() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.check_integrity([blocks])
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity([blocks, blocks])
