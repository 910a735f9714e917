"""The blocks that requests hold in one KV group. A group decides which leading tokens it can serve from the
cache, which blocks a length needs, and which of them it keeps; it knows no other group, no rows and no
scheduling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.kv_spec import KVGroupSpec
from engine.scheduler.block_pool import BlockPool


class KVGroupManager(ABC):
    """Block tables of one group. Lengths are in tokens, hits in blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.tables: dict[str, list[int]] = {}  # request id -> block ids, by block index

    @abstractmethod
    def longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> int:
        """The largest n <= max_blocks such that everything that tokens behind the first n blocks read is
        cached.
        """

    @abstractmethod
    def num_blocks_to_start(self, hit_hashes: Sequence[bytes], num_tokens: int) -> int:
        """By how many available blocks `start` and `grow` to `num_tokens` shrink the pool."""

    @abstractmethod
    def start(self, request_id: str, hit_hashes: Sequence[bytes]) -> None:
        """Open a table with the blocks of a hit, shared."""

    @abstractmethod
    def num_blocks_to_grow(self, request_id: str, num_tokens: int) -> int:
        """Blocks that `grow` would take from the pool."""

    @abstractmethod
    def grow(self, request_id: str, num_tokens: int) -> None:
        """Append blocks so that the table has slots for `num_tokens`."""

    @abstractmethod
    def commit(self, request_id: str, block_hashes: Sequence[bytes], first: int) -> None:
        """Blocks `first` .. len(block_hashes) - 1 of the table hold confirmed tokens: make them findable."""

    @abstractmethod
    def num_sole_blocks(self, request_id: str) -> int:
        """Blocks that come back to the pool when this request is freed."""

    def free(self, request_id: str, fence_step: int, *, keep_findable: bool) -> None:
        """Close the table."""
        blocks = self.tables.pop(request_id)
        if not keep_findable:
            for block in blocks:
                self.pool.withdraw(block)
        self.pool.free(blocks, fence_step)

    def check_integrity(self) -> None:
        self.pool.check_integrity(self.tables.values())


class FullAttentionGroupManager(KVGroupManager):
    """Every token reads all tokens before it: blocks stay until the request ends."""

    def longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> int:
        count = min(len(block_hashes), max_blocks)
        for index in range(count):
            if self.pool.find(block_hashes[index]) is None:
                return index
        return count

    def num_blocks_to_start(self, hit_hashes: Sequence[bytes], num_tokens: int) -> int:
        hits = [self.pool.find(block_hash) for block_hash in hit_hashes]
        num_revived = sum(block is not None and self.pool.is_available(block) for block in hits)
        return -(-num_tokens // self.block_size) - len(hits) + num_revived

    def start(self, request_id: str, hit_hashes: Sequence[bytes]) -> None:
        blocks = []
        for block_hash in hit_hashes:
            block = self.pool.find(block_hash)
            assert block is not None, "a hit vanished between lookup and start"
            self.pool.share(block)
            blocks.append(block)
        self.tables[request_id] = blocks

    def num_blocks_to_grow(self, request_id: str, num_tokens: int) -> int:
        return max(-(-num_tokens // self.block_size) - len(self.tables[request_id]), 0)

    def grow(self, request_id: str, num_tokens: int) -> None:
        self.tables[request_id] += self.pool.take(self.num_blocks_to_grow(request_id, num_tokens))

    def commit(self, request_id: str, block_hashes: Sequence[bytes], first: int) -> None:
        table = self.tables[request_id]
        for index in range(first, len(block_hashes)):
            self.pool.publish(table[index], block_hashes[index])

    def num_sole_blocks(self, request_id: str) -> int:
        return sum(map(self.pool.has_one_holder, self.tables[request_id]))


def make_group_manager(spec: KVGroupSpec, num_blocks: int, block_size: int) -> KVGroupManager:
    """The manager for a group's kind of attention."""
    assert spec.window is None, f"KV group {spec.name!r}: no manager for a window of {spec.window}"
    return FullAttentionGroupManager(num_blocks, block_size)
