"""Requests that own nothing on the device: new ones and preempted ones, in the order in which they are
served.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from engine.request import Request

_by_order = attrgetter("order")


class WaitingQueue:
    """Sorted by `Request.order`. A preempted request goes back to the place that it had."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0  # to compute before they decode

    def __len__(self) -> int:
        return len(self._requests)

    def head(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_by_order)
        self.num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.order, key=_by_order)
        assert self._requests[index] is request, f"request {request.request_id!r} does not wait"
        del self._requests[index]
        self.num_tokens -= len(request.token_ids)

    def append_tokens(self, request: Request, token_ids: list[int]) -> None:
        """A step that was in flight when the request was preempted confirmed these."""
        request.token_ids += token_ids
        self.num_tokens += len(token_ids)

    def check_integrity(self) -> None:
        orders = [request.order for request in self._requests]
        assert orders == sorted(set(orders)), "the waiting queue is out of order"
        assert self.num_tokens == sum(len(request.token_ids) for request in self._requests)
