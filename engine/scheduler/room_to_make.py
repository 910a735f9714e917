"""What a waiting request would still lack to start if running ones were preempted for it: which of their blocks really
come back to it. Nobody is preempted here.
"""

from __future__ import annotations

from collections import Counter
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
        self._num_victims: list[Counter[int]] = [Counter() for _ in groups]  # of a block's holders

    def is_enough(self, reserve: Sequence[int]) -> bool:
        """With `reserve` blocks of each group left."""
        return all(lacks + kept <= 0 for lacks, kept in zip(self._shortage, reserve, strict=True))

    def add_victim(self, request: Request) -> None:
        for index in request.kv_groups:
            num_victims, hits = self._num_victims[index], self._hits[index]
            num_holders = self._groups[index].pool.num_holders
            for block in self._groups[index].tables[request.request_id].blocks:
                if block in hits:
                    continue
                num_victims[block] += 1
                self._shortage[index] -= num_victims[block] == num_holders(block)

    def remove_victim(self, request: Request) -> None:
        for index in request.kv_groups:
            num_victims, hits = self._num_victims[index], self._hits[index]
            num_holders = self._groups[index].pool.num_holders
            for block in self._groups[index].tables[request.request_id].blocks:
                if block in hits:
                    continue
                self._shortage[index] += num_victims[block] == num_holders(block)
                num_victims[block] -= 1
