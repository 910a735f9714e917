"""The requests that own a row and blocks, in the order in which they are served; how they get and lose both.

What a request gives up is fenced by the newest step launched: a step in flight may still read and write it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from engine.request import NO_METHOD, NO_ROW, Request, RequestStatus
from engine.scheduler.kv_manager import KVManager
from engine.scheduler.row_pool import RowPool

_by_order = attrgetter("order")


class RunningSet:
    """Sorted by (priority, arrival): the first is served first, the last is the first victim."""

    def __init__(self, kv: KVManager, rows: RowPool) -> None:
        self.kv = kv
        self.rows = rows
        self.newest_step = 0  # launched
        self._requests: list[Request] = []
        self._prefills: list[Request] = []  # of these, at least those that are not over

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def last(self) -> Request:
        return self._requests[-1]

    def prefills(self) -> list[Request]:
        """Those of which tokens of the prefill are left to launch."""
        self._prefills = [request for request in self._prefills if request.num_prefill_tokens_left > 0]
        return self._prefills.copy()

    def admit(self, request: Request, num_hit_blocks: int) -> None:
        """Give the request a row, and the blocks that it starts with."""
        request.status = RequestStatus.RUNNING
        request.row = self.rows.take()
        request.prefill_end = len(request.token_ids)
        request.num_computed_tokens = num_hit_blocks * self.kv.block_size
        request.prompt_logprobs = []
        insort(self._requests, request, key=_by_order)
        insort(self._prefills, request, key=_by_order)
        request.draft_watermark = self.kv.start(request, num_hit_blocks) * self.kv.block_size
        is_behind = request.draft_watermark < request.num_computed_tokens
        request.next_draft_start = request.draft_watermark if is_behind else None

    def remove(self, request: Request, status: RequestStatus, *, keep_findable: bool = True) -> None:
        """Take row and blocks. `keep_findable`: others may go on hitting what its full blocks hold."""
        del self._requests[bisect_left(self._requests, request.order, key=_by_order)]
        if request in self._prefills:
            self._prefills.remove(request)
        self.kv.free(request, self.newest_step, keep_findable=keep_findable)
        self.rows.free(request.row, self.newest_step)
        request.row = NO_ROW
        request.status = status
        request.num_computed_tokens = request.draft_watermark = 0
        request.next_draft_start = 0
        request.next_method = NO_METHOD
        request.num_next_drafts = 0
        request.num_known_drafts = None
        request.host_drafts = []
        request.plain_decode = None

    def release(self, step: int) -> None:
        """`step` was collected."""
        self.kv.release(step)
        self.rows.release(step)

    def check_integrity(self) -> None:
        """Raise AssertionError unless order, rows and blocks agree."""
        self.kv.check_integrity()
        orders = [request.order for request in self._requests]
        prefills = [request for request in self._requests if request.num_prefill_tokens_left > 0]
        assert prefills == self.prefills(), "a prefill was lost"
        assert orders == sorted(set(orders)), "the running requests are out of order"
        owned = {request.row for request in self._requests}
        assert len(owned) == len(self._requests), "two requests own one row"
        num_rows = len(owned) + self.rows.num_free + self.rows.num_fenced
        assert num_rows == self.rows.num_rows, f"{num_rows} rows, expected {self.rows.num_rows}"
