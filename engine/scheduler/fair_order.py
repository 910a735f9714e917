"""The place of a request among all others: priority first, then fair shares between tenants, then arrival.

Start-time fair queueing (Goyal, Vin, Cheng 1996): a request starts, in virtual time, where the one before it of its
tenant ends, but not before what is being served now. A tenant with many requests thus queues behind its own, and idle
time is not saved up. What a request costs follows "Fairness in Serving Large Language Models" (Sheng et al. 2024):
its prompt when it comes, its output when it has ended. With one tenant this is the order of arrival.
"""

from __future__ import annotations

from engine.messages import AddRequest
from engine.request import Order, Request

OUTPUT_COST = 2  # of a token of output, in tokens of a prompt


class FairOrder:
    """The order of a request is given once and never changes; nobody starves, since virtual time goes on."""

    def __init__(self) -> None:
        self._virtual_time = 0  # start of the latest request that was served
        self._next_starts: dict[str, int] = {}  # by tenant; those are as many as there are tokens of callers
        self._num_placed = 0

    def place(self, message: AddRequest) -> Order:
        start = max(self._virtual_time, self._next_starts.get(message.tenant, 0))
        self._next_starts[message.tenant] = start + len(message.prompt_token_ids)
        order = (message.priority, start, self._num_placed)
        self._num_placed += 1
        return order

    def started(self, request: Request) -> None:
        self._virtual_time = max(self._virtual_time, request.order[1])

    def ended(self, request: Request) -> None:
        self._next_starts[request.message.tenant] += OUTPUT_COST * request.num_emitted_tokens
