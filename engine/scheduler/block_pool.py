"""The blocks of one KV group: who holds them, which may be handed out, which can be found by their content.

It knows neither requests nor tokens: only block ids, reference counts, content hashes and step numbers.

A block is in one of four states:
  used       ref_count > 0; hashed or not
  fenced     ref_count 0, but a step launched before it was freed is not collected yet
  evictable  ref_count 0, hashed: found by its hash until it is handed out for other content
  empty      ref_count 0, holds nothing of use
Empty blocks are handed out first, then evictable ones, least recently freed first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine.scheduler.fence import Fence

_NO_FENCE = -1


class BlockPool:
    """All operations are O(1) for each block concerned."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._fence_steps = [_NO_FENCE] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._fence: Fence[int] = Fence()
        self.num_fenced = 0

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out now."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available - self.num_fenced

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks for new content; at most `num_available`."""
        blocks = [self._take_one() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, whoever uses it."""
        return self._block_of_hash.get(block_hash)

    def is_available(self, block: int) -> bool:
        """Does sharing this block leave fewer blocks for `take`?"""
        return self._ref_counts[block] == 0 and self._fence_steps[block] == _NO_FENCE

    def num_holders(self, block: int) -> int:
        return self._ref_counts[block]

    def is_fenced(self, block: int) -> bool:
        return self._fence_steps[block] != _NO_FENCE

    def share(self, block: int) -> None:
        """One more holder of a hashed block. A fenced one may be shared too: steps in flight never write to
        full blocks of confirmed tokens, and holders of a hit only read.
        """
        assert self._hashes[block] is not None, f"block {block} holds nothing that can be shared"
        if self._ref_counts[block] == 0:
            if self._fence_steps[block] == _NO_FENCE:
                del self._evictable[block]
            else:
                self._unfence(block)
        self._ref_counts[block] += 1

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make a full block findable. Does nothing when other blocks hold the same content already."""
        assert self._ref_counts[block] > 0, f"block {block} is published by nobody"
        if block_hash not in self._block_of_hash and self._hashes[block] is None:
            self._hashes[block] = block_hash
            self._block_of_hash[block_hash] = block

    def withdraw(self, block: int) -> None:
        """Nobody may find this block any more, whether someone holds it or not."""
        self._forget_hash(block)
        if block in self._evictable:
            del self._evictable[block]
            self._empty.append(block)

    def free(self, blocks: Sequence[int], fence_step: int) -> None:
        """Drop one reference of each, the last block first: of a chain of hashes the tail is evicted first.

        `fence_step`: newest step launched; until it is collected the blocks are not handed out for other
        content.
        """
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} was freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if self._fence.is_passed(fence_step):
                self._make_available(block)
            else:
                self._fence_steps[block] = fence_step
                self.num_fenced += 1
                self._fence.hold(fence_step, block)

    def release(self, step: int) -> None:
        """`step` was collected: what was fenced by it becomes available."""
        for fence_step, block in self._fence.release(step):
            # A block that was shared meanwhile has no fence, or a newer one of its own.
            if self._fence_steps[block] == fence_step:
                self._unfence(block)
                self._make_available(block)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the books agree with each other and with the blocks of each holder."""
        expected = Counter(block for blocks in holders for block in blocks)
        fenced = {block for block, step in enumerate(self._fence_steps) if step != _NO_FENCE}
        empty, evictable = set(self._empty), set(self._evictable)
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        for block, count in enumerate(self._ref_counts):
            assert count == expected[block], f"block {block}: {count} references, {expected[block]} holders"
        assert len(empty) == len(self._empty), "an empty block is listed twice"
        states = (used, fenced, evictable, empty)
        assert sum(map(len, states)) == self.num_blocks == len(set().union(*states)), (
            "a block has no single state"
        )
        assert self.num_fenced == len(fenced), f"{self.num_fenced} fenced blocks counted, {len(fenced)} found"
        assert all(self._hashes[block] is not None for block in evictable), "an evictable block has no hash"
        assert all(self._hashes[block] is None for block in empty), "an empty block has a hash"
        hashes = {content: block for block, content in enumerate(self._hashes) if content is not None}
        assert hashes == self._block_of_hash, "the hash table disagrees with the blocks"

    def _take_one(self) -> int:
        if self._empty:
            return self._empty.pop()
        block, _ = self._evictable.popitem(last=False)
        self._forget_hash(block)
        return block

    def _make_available(self, block: int) -> None:
        if self._hashes[block] is None:
            self._empty.append(block)
        else:
            self._evictable[block] = None

    def _unfence(self, block: int) -> None:
        self._fence_steps[block] = _NO_FENCE
        self.num_fenced -= 1

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_of_hash[block_hash]
            self._hashes[block] = None
