"""Keeps freed things (blocks, rows) back until the steps that may still use them were collected.

Steps are numbered consecutively and are collected in order. It does not know what it keeps.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Fence(Generic[T]):
    """Example: step 7 is in flight when a row is freed: `hold(7, row)`; `release(7)` returns it."""

    def __init__(self) -> None:
        self.collected_step = 0
        self._held: deque[tuple[int, T]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def is_passed(self, step: int) -> bool:
        return step <= self.collected_step

    def hold(self, step: int, item: T) -> None:
        """Keep `item` until `step` is collected; steps never decrease from call to call."""
        assert not self._held or self._held[-1][0] <= step
        self._held.append((step, item))

    def release(self, step: int) -> list[tuple[int, T]]:
        """`step` was collected: what waited for it or for an earlier one, each with its step, in order."""
        self.collected_step = step
        released = []
        while self._held and self._held[0][0] <= step:
            released.append(self._held.popleft())
        return released
