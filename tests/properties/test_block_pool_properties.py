"""The block pool against a plain model of it, under any order of takes, hits, frees, launches and
collections.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.scheduler.block_pool import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """`tables`: blocks of each holder. `fences`: block -> newest step launched when it was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}  # block -> what was published there
        self.fences: dict[int, int] = {}
        self.launched = 0
        self.collected = 0
        self.num_contents = 0

    @initialize(num_blocks=st.integers(1, 12))
    def create(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks

    @rule(count=st.integers(0, 12))
    def take(self, count: int) -> None:
        count = min(count, self.pool.num_available)
        num_cached, num_empty = self.pool.num_cached, self.pool.num_available - self.pool.num_cached
        blocks = self.pool.take(count)
        held = {block for table in self.tables for block in table}
        assert held.isdisjoint(blocks), "a used block was handed out"
        assert len(set(blocks)) == count
        for block in blocks:
            assert self.fences.pop(block, 0) <= self.collected, "a fenced block was handed out"
            self.contents.pop(block, None)
        assert self.pool.num_cached == num_cached - max(count - num_empty, 0), "cached blocks go last"
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), is_new=st.booleans())
    def publish(self, data: st.DataObject, is_new: bool) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        if is_new or not self.contents:
            self.num_contents += 1
            content = b"%d" % self.num_contents
        else:
            content = data.draw(st.sampled_from(sorted(self.contents.values())))
        self.pool.publish(block, content)
        if block not in self.contents and content not in self.contents.values():
            self.contents[block] = content

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block, content = data.draw(st.sampled_from(sorted(self.contents.items())))
        assert self.pool.find(content) == block
        available = self.pool.num_available
        was_available = self.pool.is_available(block)
        self.pool.share(block)
        assert self.pool.num_available == available - was_available
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table, self.launched)
        for block in table:
            self.fences[block] = self.launched

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """Whether the block is held, fenced, free or empty."""
        block = data.draw(st.integers(0, self.num_blocks - 1))
        self.pool.withdraw(block)
        content = self.contents.pop(block, None)
        assert content is None or self.pool.find(content) is None

    @precondition(lambda self: self.launched < self.collected + 2)
    @rule()
    def launch(self) -> None:
        self.launched += 1

    @precondition(lambda self: self.launched > self.collected)
    @rule()
    def collect(self) -> None:
        self.collected += 1
        self.pool.release(self.collected)

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.tables)
        held = Counter(block for table in self.tables for block in table)
        fenced = {block for block, step in self.fences.items() if step > self.collected and not held[block]}
        assert self.pool.num_used == len(held)
        assert self.pool.num_fenced == len(fenced)
        assert self.pool.num_available == self.num_blocks - len(held) - len(fenced)
        for block, content in self.contents.items():
            assert self.pool.find(content) == block

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.free(table, self.launched)
        for step in range(self.collected + 1, self.launched + 1):
            self.pool.release(step)
        if hasattr(self, "pool"):
            self.pool.check_integrity([])
            assert self.pool.num_available == self.num_blocks


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
