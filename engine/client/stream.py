"""The outputs of one request between engine and reader: merged while unread, never waited for.

Knows neither sockets nor threads; everything happens on the event loop of the client that made it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.client.base import RequestStream
from engine.errors import EngineError
from engine.messages import RequestOutput


class MergingStream(RequestStream):
    """Holds at most one output: all news since the last read, bounded by the request's max_tokens."""

    def __init__(
        self,
        request_id: str,
        on_close: Callable[[], None],
        wake: Callable[[asyncio.Event], None] = asyncio.Event.set,
    ) -> None:
        """`on_close` is called once, if the reader leaves before the end; `wake` sets the event, now or soon, that a
        reader waits for.
        """
        self.request_id = request_id
        self._on_close = on_close
        self._wake = wake
        self._unread: RequestOutput | None = None
        self._unread_since = 0.0
        self._error: EngineError | None = None
        self._is_ended = False  # by `finish` or an error: nothing more will come
        self._is_closed = False
        self._news = asyncio.Event()

    def put(self, output: RequestOutput, now: float) -> None:
        """Add news. `now`: monotonic seconds."""
        if self._is_closed:
            return
        self._is_ended = output.finish is not None
        if self._unread is None:
            self._unread, self._unread_since = output, now
            self._wake(self._news)
        else:
            merge(self._unread, output)

    def fail(self, error: EngineError) -> None:
        """End with this error, which the reader gets after what is unread."""
        self._is_ended = True
        self._error = error
        self._news.set()

    def give_up(self, error: EngineError) -> None:
        """The reader is too slow: drop what is unread; its next read raises."""
        self.fail(error)
        self._is_closed = True
        self._unread = None

    def unread_seconds(self, now: float) -> float:
        """For how long the oldest unread output has waited; 0 for a request that needs no reader any more."""
        if self._unread is None or self._is_ended or self._is_closed:
            return 0.0
        return now - self._unread_since

    async def next(self) -> RequestOutput:
        while self._unread is None:
            if self._error is not None:
                raise self._error
            assert not self._is_ended, "the output with `finish` has been read"
            self._news.clear()
            await self._news.wait()
        output, self._unread = self._unread, None
        return output

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._unread = None
        if not self._is_ended:
            self._on_close()


def merge(unread: RequestOutput, newer: RequestOutput) -> None:
    """Append the deltas of `newer` to `unread` and take over its totals."""
    unread.token_ids += newer.token_ids
    unread.spec += newer.spec
    if newer.logprobs is not None:
        unread.logprobs = unread.logprobs if unread.logprobs is not None else []
        unread.logprobs += newer.logprobs
    if newer.prompt_logprobs is not None:
        unread.prompt_logprobs = newer.prompt_logprobs
    unread.finish = newer.finish
    unread.num_prompt_tokens = newer.num_prompt_tokens
    unread.num_cached_tokens = newer.num_cached_tokens
    unread.num_preemptions = newer.num_preemptions
    unread.times = newer.times
