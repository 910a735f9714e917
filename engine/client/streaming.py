"""What the clients share: live requests and their streams, load figures, refusals, slow readers, failure.

A client adds how an engine is launched, reached and shut down. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import cast

from engine.client.base import EngineClient, RequestStream
from engine.client.stream import MergingStream
from engine.client.wakes import Wakes
from engine.control import Action, AnyAction, AnyResult, Result
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
    Control,
    ControlAnswer,
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
        self._wakes = Wakes()
        self._controls: dict[str, asyncio.Future[AnyResult]] = {}  # without an answer
        self._heard_at = 0.0  # time.monotonic() of the last message, or of the work that ended an idle time
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
        if not self._streams:
            self._heard_at = time.monotonic()  # of an idle engine nobody expects news
        stream = MergingStream(
            request.request_id, lambda: self._send(AbortRequests([request.request_id])), self._wakes.wake
        )
        self._streams[request.request_id] = stream
        self._send(request)
        return stream

    def abort(self, request_ids: list[str]) -> list[str]:
        live = [request_id for request_id in request_ids if request_id in self._streams]
        if live:
            self._send(AbortRequests(live))
        return live

    async def control(self, action: Action[Result]) -> Result:
        if not self.is_alive:
            raise EngineUnavailableError("the engine is not ready")
        control_id = f"control-{secrets.token_hex(8)}"
        answer: asyncio.Future[AnyResult] = asyncio.get_running_loop().create_future()
        self._controls[control_id] = answer
        self._send(Control(control_id, cast(AnyAction, action)))
        try:
            return cast(Result, await answer)
        finally:
            self._controls.pop(control_id, None)

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
            for control_id in list(self._controls):
                self._end_control(control_id, EngineUnavailableError("the engine was stopped"))
            for stream in self._take_streams():
                stream.put(_cancelled(stream.request_id), time.monotonic())

    # ---- what comes from the engine ----------------------------------------------------------------------

    def _receive(self, message: FromEngine) -> None:
        if self._failure is not None:
            return  # it was on its way when the engine was given up
        self._heard_at = time.monotonic()
        match message:
            case StepMessage():
                self._receive_step(message)
            case RequestRefused():
                refused = self._streams.pop(message.request_id, None)
                if refused is not None:
                    refused.fail(message.to_error())
                self._end_control(message.request_id, message.to_error())
            case ControlAnswer():
                self._end_control(message.control_id, message.result)
            case LoadProgress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case ModelInfo():
                self._model_info = message
                if self._ready is not None and not self._ready.done():
                    self._stats = EngineStats(
                        num_blocks=message.num_blocks, num_free_blocks=message.num_blocks
                    )
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
        self._stats = EngineStats()  # it has no load any more: nobody should wait for it, or scale by it
        self._has_failed.set()
        gone = EngineUnavailableError("the engine stopped working")
        for control_id in list(self._controls):
            self._end_control(control_id, gone)
        for stream in self._take_streams():
            stream.fail(gone)

    def _end_control(self, control_id: str, outcome: AnyResult | EngineError) -> None:
        answer = self._controls.get(control_id)
        if answer is None or answer.done():
            return  # who asked has left
        if isinstance(outcome, EngineError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def _seconds_without_news(self, now: float) -> float:
        """Of an engine that has work; 0 for one that has none."""
        return now - self._heard_at if self._streams else 0.0

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
