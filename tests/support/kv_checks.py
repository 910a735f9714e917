"""What must hold of rows, blocks and plans whatever the scheduler does: checked against its books and against what
the fake device read and wrote.
"""

from __future__ import annotations

from collections import Counter

from engine.request import Request, RequestStatus
from engine.scheduler.kv_group import KVGroupManager
from engine.scheduler.scheduler import Scheduler
from engine.step import StepPlan


class KVChecks:
    """`max_unconfirmed`: slots behind the confirmed tokens that one request may have; `max_unfed`: the same behind the
    watermark of a drafter that catches up.
    """

    def __init__(self, scheduler: Scheduler, block_size: int, max_unconfirmed: int, max_unfed: int) -> None:
        self._scheduler = scheduler
        self._block_size = block_size
        self._max_unconfirmed = max_unconfirmed
        self._max_unfed = max_unfed
        self._held_at: dict[
            int, list[set[int]]
        ] = {}  # step -> per group: blocks of its requests at the launch

    @property
    def groups(self) -> list[KVGroupManager]:
        return self._scheduler._kv._groups

    def check_launch(self, plan: StepPlan, in_flight: list[int], touched: list[set[tuple[str, int]]]) -> None:
        """Right after the launch. in_flight: steps before it; touched: by group, (request id, block) that the device
        read or wrote in it.
        """
        self._check_updates(plan)
        self._check_handed_out(plan, in_flight)
        requests = self._scheduler._in_flight[-1].requests
        self._held_at[plan.step] = [
            {
                block
                for request in requests
                if request.request_id in group.tables
                for block in group.tables[request.request_id].blocks
            }
            for group in self.groups
        ]
        for group, blocks in zip(self.groups, touched, strict=True):
            held = {(name, block) for name, table in group.tables.items() for block in table.blocks}
            assert blocks <= held, f"read or written, but not held: {blocks - held}"

    def check(self) -> None:
        """At any time."""
        running = {request.request_id: request for request in self._scheduler._running}
        assert all(request.status is RequestStatus.RUNNING for request in running.values())
        for index, group in enumerate(self.groups):
            self._check_shared_blocks(index, running)
            if group.spec.window is not None:
                self._check_bound(group, running)

    def _check_updates(self, plan: StepPlan) -> None:
        """They say what the tables of running requests say, and nothing twice: their order is not defined."""
        owners = {request.row: request.request_id for request in self._scheduler._running}
        written: set[tuple[int, int, int]] = set()
        for update in plan.block_table_updates:
            table = self.groups[update.group].tables[owners[update.row]]
            for index, block in enumerate(update.block_ids, update.start):
                assert table.blocks[index - table.first] == block, "an update disagrees with the table"
                assert (update.group, update.row, index) not in written, "an entry is written twice"
                written.add((update.group, update.row, index))

    def _check_handed_out(self, plan: StepPlan, in_flight: list[int]) -> None:
        """New blocks, all but those of a hit, are none of the steps in flight."""
        hits = {new.row: new.num_computed_tokens // self._block_size for new in plan.new_rows}
        for update in plan.block_table_updates:
            written = update.block_ids[max(hits.get(update.row, 0) - update.start, 0) :]
            for step in in_flight:
                held = self._held_at[step][update.group]
                assert held.isdisjoint(written), f"blocks of step {step} in flight were handed out"

    def _check_bound(self, group: KVGroupManager, running: dict[str, Request]) -> None:
        """However long a request is: its blocks are as many as neighbouring tokens can lie in."""
        num_tokens = group.spec.window or 0
        num_tokens += group.spec.extra_window_keys - 1
        is_fed = group in [self.groups[i] for request in running.values() for i in request.draft_kv_groups]
        num_tokens += self._max_unfed if is_fed else self._max_unconfirmed
        bound = max(-(-(offset + num_tokens) // self._block_size) for offset in range(self._block_size))
        for request_id, table in group.tables.items():
            assert len(table.blocks) <= bound, f"{request_id}: {len(table.blocks)} blocks, bound {bound}"

    def _check_shared_blocks(self, index: int, running: dict[str, Request]) -> None:
        """A block with several holders is a full block of computed tokens for each of them."""
        group = self.groups[index]
        counts = Counter(block for table in group.tables.values() for block in table.blocks)
        for request_id, table in group.tables.items():
            request = running[request_id]
            is_fed = index in request.draft_kv_groups
            num_valid = request.draft_watermark if is_fed else request.num_computed_tokens
            for position, block in enumerate(table.blocks, table.first):
                if counts[block] > 1:
                    assert num_valid >= (position + 1) * self._block_size, "a shared block is written"
