"""Wakes the readers of streams, a few in each turn of the event loop.

A step has news for every stream at once, and each reader that wakes encodes and writes a message. grpc.aio takes new
calls one after the other, each in some six turns of the loop: were all readers woken in one turn, a turn would last as
long as all their writes, and calls would queue before anybody could refuse them. Knows no streams.
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 2


class Wakes:
    """Sets events in the order in which it was asked to. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Event] = deque()

    def wake(self, event: asyncio.Event) -> None:
        """Set it in one of the next turns."""
        self._waiting.append(event)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        for _ in range(min(PER_TURN, len(self._waiting))):
            self._waiting.popleft().set()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
