"""What the clients share: live requests and their streams, load figures, refusals, slow readers, failure.

A client adds how an engine is launched, reached and shut down. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Callable

from engine.client.base import EngineClient, RequestStream
from engine.client.stream import MergingStream
from engine.errors import (
    EngineError,
    EngineUnavailableError,
    QueueFullError,
    RequestIdInUseError,
    SlowReaderError,
)
from engine.loop import Command
from engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FinishInfo,
    FromEngine,
    LoadProgress,
    ModelInfo,
    RequestOutput,
    RequestRefused,
    StepMessage,
)
from engine.stats import EngineStats, StepStats

log = logging.getLogger(__name__)

SWEEPS_PER_TIMEOUT = 4
RETRY_AFTER_SECONDS = 1.0

StepCallback = Callable[[list[RequestOutput], StepStats | None], None]


class StreamingClient(EngineClient):
    """An EngineClient without its transport."""

    def __init__(self, max_waiting: int, slow_reader_timeout: float) -> None:
        self._max_waiting = max_waiting
        self._slow_reader_timeout = slow_reader_timeout
        # A request stays here until the engine said how it ended, even after its reader has left: only then
        # can its id be used again.
        self._streams: dict[str, MergingStream] = {}
        self._step_callbacks: list[StepCallback] = []
        self._on_progress: Callable[[LoadProgress], None] | None = None
        self._model_info: ModelInfo | None = None
        self._stats = EngineStats()
        self._ready: asyncio.Future[None] | None = None
        self._failure: EngineError | None = None
        self._has_failed = asyncio.Event()
        self._is_stopping = False
        self._lifecycle = asyncio.Lock()  # launch and shutdown never overlap
        self._sweeper: asyncio.Task[None] | None = None

    # ---- the transport -----------------------------------------------------------------------------------

    @abstractmethod
    async def _launch(self) -> None:
        """Start the engine; it answers through `_receive`, and `_fail` if it is lost."""

    @abstractmethod
    def _send(self, message: Command) -> None:
        """Hand a message over; does not wait."""

    @abstractmethod
    async def _shut_down(self) -> None:
        """Stop the engine, take in its last messages and free everything; also after a failed launch."""

    # ---- EngineClient ------------------------------------------------------------------------------------

    @property
    def model_info(self) -> ModelInfo:
        assert self._model_info is not None, "the engine has not started"
        return self._model_info

    @property
    def is_alive(self) -> bool:
        return self._model_info is not None and self._failure is None and not self._is_stopping

    @property
    def stats(self) -> EngineStats:
        return self._stats

    async def start(self, on_progress: Callable[[LoadProgress], None] | None = None) -> None:
        assert self._ready is None, "a client starts once"
        self._on_progress = on_progress
        self._ready = asyncio.get_running_loop().create_future()
        try:
            async with self._lifecycle:
                if self._is_stopping:
                    raise EngineUnavailableError("the engine was stopped")
                await self._launch()
            await self._ready
        except BaseException:
            self._ready.cancel()  # nobody waits for it any more
            await self.stop()
            raise
        self._sweeper = asyncio.create_task(self._sweep(), name="slow-reader-sweeper")

    def submit(self, request: AddRequest) -> RequestStream:
        if not self.is_alive:
            raise EngineUnavailableError("the engine is not ready")
        if request.request_id in self._streams:
            raise RequestIdInUseError(request.request_id)
        if self._stats.num_waiting >= self._max_waiting:
            # The engine would refuse it as well; this spares the way there when it is busiest.
            raise QueueFullError(
                f"{self._stats.num_waiting} requests wait, the limit is {self._max_waiting}",
                RETRY_AFTER_SECONDS,
            )
        stream = MergingStream(request.request_id, lambda: self._send(AbortRequests([request.request_id])))
        self._streams[request.request_id] = stream
        self._send(request)
        return stream

    def abort(self, request_ids: list[str]) -> list[str]:
        live = [request_id for request_id in request_ids if request_id in self._streams]
        if live:
            self._send(AbortRequests(live))
        return live

    def on_step(self, callback: StepCallback) -> None:
        self._step_callbacks.append(callback)

    async def wait_failed(self) -> EngineError:
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    async def stop(self) -> None:
        async with self._lifecycle:  # a second caller returns when the engine has stopped
            if self._is_stopping:
                return
            self._is_stopping = True
            if self._sweeper is not None:
                self._sweeper.cancel()
            await self._shut_down()
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(EngineUnavailableError("the engine was stopped while it started"))
            for stream in self._take_streams():
                stream.put(_cancelled(stream.request_id), time.monotonic())

    # ---- what comes from the engine ----------------------------------------------------------------------

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepMessage():
                self._receive_step(message)
            case RequestRefused():
                refused = self._streams.pop(message.request_id, None)
                if refused is not None:
                    refused.fail(message.to_error())
            case LoadProgress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case ModelInfo():
                self._model_info = message
                self._stats = EngineStats(num_blocks=message.num_blocks, num_free_blocks=message.num_blocks)
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)
            case EngineFailed():
                self._fail(message.to_error())

    def _receive_step(self, message: StepMessage) -> None:
        self._stats = message.stats
        for callback in self._step_callbacks:
            callback(message.outputs, message.step)
        now = time.monotonic()
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish is not None:
                del self._streams[output.request_id]
            stream.put(output, now)

    def _fail(self, reason: EngineError) -> None:
        """The engine is lost. The first reason counts, and goes to the log only: it may be internal."""
        if self._failure is not None or self._is_stopping:
            return
        self._failure = reason
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(reason)
            return
        log.error("the engine is gone: %s", reason)
        self._has_failed.set()
        for stream in self._take_streams():
            stream.fail(EngineUnavailableError("the engine stopped working"))

    def _take_streams(self) -> list[MergingStream]:
        streams = list(self._streams.values())
        self._streams.clear()
        return streams

    # ---- slow readers ------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._slow_reader_timeout / SWEEPS_PER_TIMEOUT)
            self._give_up_slow_readers(time.monotonic())

    def _give_up_slow_readers(self, now: float) -> None:
        for stream in self._streams.values():
            if stream.unread_seconds(now) > self._slow_reader_timeout:
                message = f"the client did not read its stream for {self._slow_reader_timeout:g} s"
                stream.give_up(SlowReaderError(message))
                self._send(AbortRequests([stream.request_id]))


def _cancelled(request_id: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish=FinishInfo(reason="cancelled"))
