"""The blocks that requests hold in one KV group. A group decides which leading tokens it can serve from the
cache, which blocks a length needs, and which of them it keeps; it knows no other group, no rows and no
scheduling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_spec import KVGroupSpec
from engine.scheduler.block_pool import BlockPool


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request by block index, `first` .. `end - 1`; those before `first` are held no more."""

    first: int
    blocks: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class KVGroupManager(ABC):
    """Block tables of one group. Lengths are in tokens, hits in blocks."""

    def __init__(self, spec: KVGroupSpec, num_blocks: int, block_size: int) -> None:
        self.spec = spec
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.tables: dict[str, BlockTable] = {}  # by request id

    @abstractmethod
    def longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> int:
        """The largest n <= max_blocks such that everything that tokens behind the first n blocks read is
        cached.
        """

    @abstractmethod
    def start(self, request_id: str, hit_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Open a table with what later tokens read of a hit, shared. A group that keeps all blocks to the end takes
        those for the rest of `num_tokens` at once.
        """

    @abstractmethod
    def longest_request(self, limit: int) -> int:
        """Tokens, at most `limit`, that a request alone in the pool can reach."""

    def num_blocks_to_start(self, hit_hashes: Sequence[bytes], num_tokens: int) -> int:
        """By how many available blocks a request shrinks the pool from `start` until `num_tokens` are computed, each
        step after the one before it; larger steps need more, if there are more.
        """
        first = self._first_block(len(hit_hashes) * self.block_size)
        num_shared = sum(not self.pool.is_available(block) for block in self.hit_blocks(hit_hashes))
        return self._max_held_blocks(num_tokens - first * self.block_size) - num_shared

    def hit_blocks(self, hit_hashes: Sequence[bytes]) -> list[int]:
        """Those that `start` would share, as far as they are there."""
        first = self._first_block(len(hit_hashes) * self.block_size)
        found = map(self.pool.find, hit_hashes[first:])
        return [block for block in found if block is not None]

    def num_blocks_to_grow(self, request_id: str, num_tokens: int) -> int:
        """Blocks that `grow` would take from the pool."""
        return max(-(-num_tokens // self.block_size) - self.tables[request_id].end, 0)

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Append blocks so that the table has slots up to `num_tokens`. Returns these."""
        blocks = self.pool.take(self.num_blocks_to_grow(request_id, num_tokens))
        self.tables[request_id].blocks += blocks
        return blocks

    def num_slots(self, request_id: str) -> int:
        """Tokens from the first on that have slots, or had them."""
        table = self.tables[request_id]
        return (table.first + len(table.blocks)) * self.block_size

    def publish(self, request_id: str, block_hashes: Sequence[bytes], first: int) -> None:
        """Blocks `first` .. len(block_hashes) - 1 of the table hold confirmed tokens: make them findable."""
        table = self.tables[request_id]
        for index in range(first, len(block_hashes)):
            self.pool.publish(table.blocks[index - table.first], block_hashes[index])

    def slide(self, request_id: str, num_tokens: int, fence_step: int) -> None:
        """`num_tokens` are confirmed: give back the blocks that no later step reads. Who hashes them still finds
        them until they are handed out for other content, not before `fence_step` is collected.
        """
        if self.spec.window is None:
            return
        table = self.tables[request_id]
        num_passed = self._first_block(num_tokens) - table.first
        if num_passed > 0:
            self.pool.free(table.blocks[:num_passed], fence_step)
            del table.blocks[:num_passed]
            table.first += num_passed

    def next_commit(self, num_tokens: int) -> int:
        """Confirmed tokens from which on there may be one more block to publish or to give back than at `num_tokens`.

        Example, block_size 4, window 6, 10 tokens: block 2 is full at 12; block 1 is passed when the first key is 8, at
        13: 12.
        """
        num_left = self.block_size - num_tokens % self.block_size
        if self.spec.window is not None:
            num_left = min(num_left, self.block_size - self.spec.first_key(num_tokens) % self.block_size)
        return num_tokens + num_left

    def free(self, request_id: str, fence_step: int) -> None:
        """Close the table."""
        self.pool.free(self.tables.pop(request_id).blocks, fence_step)

    def withdraw(self, block_hashes: Sequence[bytes]) -> None:
        """Nobody may find these contents any more."""
        for block_hash in block_hashes:
            block = self.pool.find(block_hash)
            if block is not None:
                self.pool.withdraw(block)

    def check_integrity(self) -> None:
        self.pool.check_integrity(table.blocks for table in self.tables.values())

    def _first_block(self, num_tokens: int) -> int:
        """That is read when so many tokens are computed."""
        return self.spec.first_key(num_tokens) // self.block_size

    def _max_held_blocks(self, num_tokens: int) -> int:
        """When every token is computed on its own."""
        return self.spec.max_held_blocks(num_tokens, 1, self.block_size)

    def _share(self, hit_hashes: Sequence[bytes]) -> BlockTable:
        first = self._first_block(len(hit_hashes) * self.block_size)
        blocks = self.hit_blocks(hit_hashes)
        assert len(blocks) == len(hit_hashes) - first, "a hit vanished between lookup and start"
        for block in blocks:
            self.pool.share(block)
        return BlockTable(first, blocks)


class FullAttentionGroupManager(KVGroupManager):
    """Every token reads all tokens before it: blocks stay until the request ends."""

    def longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> int:
        count = min(len(block_hashes), max_blocks)
        for index in range(count):
            if self.pool.find(block_hashes[index]) is None:
                return index
        return count

    def start(self, request_id: str, hit_hashes: Sequence[bytes], num_tokens: int) -> None:
        self.tables[request_id] = self._share(hit_hashes)
        self.grow(request_id, num_tokens)

    def longest_request(self, limit: int) -> int:
        return min(limit, self.pool.num_blocks * self.block_size)


class SlidingWindowGroupManager(KVGroupManager):
    """A token reads the last `window` tokens: blocks are taken step by step and given back behind the window.

    With d steps in flight, each of at most m tokens of a request, and a drafter that writes up to l tokens behind
    them, a request holds at most `spec.max_held_blocks(its length, d * m + l, block_size)` blocks: those of
    window - 1 + extra_window_keys + d * m + l neighbouring tokens, however long it is.
    """

    def longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> int:
        """From the end: a missing block spoils every hit whose last window reaches it.

        Example, block_size 4, window 6, blocks 0..5 of which 2 is missing: a hit of 6 reads keys 19..23 of blocks
        4 and 5, so it is 6; were 4 missing, 4 would read keys 11..15 of blocks 2 and 3, and 2 keys 3..7: it is 2.
        """
        hit = min(len(block_hashes), max_blocks)
        index = hit - 1
        while index >= self._first_block(hit * self.block_size):
            if self.pool.find(block_hashes[index]) is None:
                hit = index
            index -= 1
        return hit

    def start(self, request_id: str, hit_hashes: Sequence[bytes], num_tokens: int) -> None:
        self.tables[request_id] = self._share(hit_hashes)

    def longest_request(self, limit: int) -> int:
        if self._max_held_blocks(limit) <= self.pool.num_blocks:
            return limit
        return self.pool.num_blocks * self.block_size


def make_group_manager(spec: KVGroupSpec, num_blocks: int, block_size: int) -> KVGroupManager:
    """The manager for a group's kind of attention."""
    manager = FullAttentionGroupManager if spec.window is None else SlidingWindowGroupManager
    return manager(spec, num_blocks, block_size)
