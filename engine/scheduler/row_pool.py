"""The request rows: fixed slots of device state, each owned by one running request or free."""

from __future__ import annotations

from engine.scheduler.fence import Fence


class RowPool:
    """Hands out rows 0..num_rows-1. A freed row is handed out again once its fence has passed."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._fence: Fence[int] = Fence()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        return len(self._fence)

    def take(self) -> int:
        return self._free.pop()

    def free(self, row: int, fence_step: int) -> None:
        if self._fence.is_passed(fence_step):
            self._free.append(row)
        else:
            self._fence.hold(fence_step, row)

    def release(self, step: int) -> None:
        """`step` was collected."""
        self._free.extend(row for _, row in self._fence.release(step))
