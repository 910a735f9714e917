"""The generation calls that run at this moment: unique ids, abort by id, and ending a call from outside.

A call is a task of the event loop. To end it, its task is cancelled with the reason kept here, so that one
`finally` frees the engine's requests whatever the reason is. A status cannot overtake a message that is on
its way: a call that writes ends once the message is out, and is cut where that takes too long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import EngineError, RequestIdInUseError, SlowReaderError


@dataclass(eq=False)
class LiveCall:
    """One Generate or GenerateOnce."""

    engine_ids: tuple[str, ...]
    task: asyncio.Task[object]
    is_submitted: bool = False  # the engine knows its requests
    is_aborted: bool = False
    end_reason: EngineError | None = None
    write_began: float = 0.0  # time.monotonic() of what the transport has not taken yet; 0: nothing

    async def send(self, written: Awaitable[None]) -> None:
        """Wait until the transport has taken something. Raises the reason why the call has to end."""
        self.write_began = time.monotonic()
        await written
        self.write_began = 0.0
        if self.end_reason is not None:
            raise self.end_reason

    def end(self, reason: EngineError) -> None:
        """Make the call fail with this error, after what is on its way. The first reason stays."""
        if self.end_reason is None:
            self.end_reason = reason
            if not self.write_began:
                self.task.cancel()

    def cut(self, reason: EngineError) -> None:
        """Make the call fail at once; its client sees the status when it reads on."""
        self.end_reason = self.end_reason or reason
        self.task.cancel()


class LiveCalls:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._calls: dict[str, LiveCall] = {}  # by the engine's id of the first choice
        self._engine_ids: set[str] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def enter(self, request_id: str, engine_ids: tuple[str, ...]) -> Iterator[LiveCall]:
        """Keep the current task's call in the table. Raises RequestIdInUseError, with the id that the client knows.

        Turns the cancellation that `end` or `cut` caused back into its reason.
        """
        if not self._engine_ids.isdisjoint(engine_ids):
            raise RequestIdInUseError(request_id)
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        call = LiveCall(engine_ids, task)
        self._calls[engine_ids[0]] = call
        self._engine_ids.update(engine_ids)
        self._is_empty.clear()
        try:
            yield call
        except asyncio.CancelledError:
            if call.end_reason is None:
                raise
            task.uncancel()
            raise call.end_reason from None
        finally:
            del self._calls[engine_ids[0]]
            self._engine_ids.difference_update(engine_ids)
            if not self._calls:
                self._is_empty.set()

    def find(self, engine_id: str) -> LiveCall | None:
        """By the engine's id of its first choice."""
        return self._calls.get(engine_id)

    def end_slow_readers(self, now: float, timeout: float) -> None:
        """Cut the calls whose client has not taken a message for longer than `timeout` seconds.

        The engine's client watches unread outputs; this watches the message that is stuck in the transport.
        """
        for call in list(self._calls.values()):
            if call.write_began and now - call.write_began > timeout:
                call.cut(SlowReaderError(f"the client did not read its stream for {timeout:g} s"))

    async def wait_until_empty(self) -> None:
        await self._is_empty.wait()

    async def end_all(self, reason: EngineError, timeout: float) -> None:
        """End every call and wait for it; after `timeout` seconds, cut those whose client does not read."""
        for call in list(self._calls.values()):
            call.end(reason)
        try:
            await asyncio.wait_for(self.wait_until_empty(), timeout)
        except TimeoutError:
            for call in list(self._calls.values()):
                call.cut(reason)
            await self.wait_until_empty()
