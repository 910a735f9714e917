"""What a waiting request would still lack to start if running ones were preempted for it: which of their blocks really
come back to it. Nobody is preempted here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from engine.request import Request
from engine.scheduler.kv_group import KVGroupManager


class RoomToMake:
    """A block comes back when all who hold it are preempted: two who share a prefix give it back together. One that the
    waiting request would share anyway is no gain.
    """

    def __init__(
        self, groups: Sequence[KVGroupManager], shortage: Sequence[int], hits: Sequence[set[int]]
    ) -> None:
        """By group: blocks missing once the steps in flight are collected (<= 0: none), and those of the prefix hit."""
        self._groups = groups
        self._shortage = list(shortage)
        self._hits = hits
        # Of a block's holders.
        self._num_victims: list[defaultdict[int, int]] = [defaultdict(int) for _ in groups]

    def is_enough(self, reserve: Sequence[int]) -> bool:
        """With `reserve` blocks of each group left."""
        return all(lacks + kept <= 0 for lacks, kept in zip(self._shortage, reserve, strict=True))

    def could_be_enough(self, victims: Sequence[Request]) -> bool:
        """A quick bound: if they shared no block, and none had to be left."""
        names = [request.request_id for request in victims]
        return all(
            lacks <= sum(len(table.blocks) for name in names if (table := group.tables.get(name)) is not None)
            for group, lacks in zip(self._groups, self._shortage, strict=True)
            if lacks > 0
        )

    def add_victim(self, request: Request) -> None:
        self._count(request, 1)

    def remove_victim(self, request: Request) -> None:
        self._count(request, -1)

    def _count(self, request: Request, change: int) -> None:
        """One holder more, or fewer, is a victim: of all blocks that could be a gain."""
        for index in request.kv_groups:
            num_victims, hits = self._num_victims[index], self._hits[index]
            num_holders = self._groups[index].pool.num_holders
            num_gained = 0
            removed = min(change, 0)  # the count of before decides then
            for block in self._groups[index].tables[request.request_id].blocks:
                if block in hits:
                    continue
                num_victims[block] = after = num_victims[block] + change
                num_gained += after - removed == num_holders(block)
            self._shortage[index] -= change * num_gained
