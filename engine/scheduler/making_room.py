"""What a waiting request would still lack to start if running ones were preempted for it: which of their blocks really
come back to it. Nobody is preempted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.request import Request
from engine.scheduler.kv_group import KVGroupManager


class MakingRoom:
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
        self._num_preempted: list[Counter[int]] = [Counter() for _ in groups]  # of a block's holders

    @property
    def is_enough(self) -> bool:
        return max(self._shortage) <= 0

    def add_victim(self, request: Request) -> None:
        for index in request.kv_groups:
            group, num_preempted = self._groups[index], self._num_preempted[index]
            for block in group.tables[request.request_id].blocks:
                num_preempted[block] += 1
                if num_preempted[block] == group.pool.num_holders(block) and block not in self._hits[index]:
                    self._shortage[index] -= 1
