"""An engine in a process of its own, over ZeroMQ. Imports neither core nor torch.

The process is spawned, never forked, and must be spawned before gRPC starts its threads. It dies with this
process; its own death ends every stream with EngineUnavailableError.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.client.engine_process import EngineProcess
from engine.client.streaming import StreamingClient
from engine.config import EngineConfig
from engine.errors import EngineUnavailableError
from engine.loop import Command
from engine.messages import FromEngine, Hello, Shutdown

log = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "engine.main")
LOOKS_PER_TIMEOUT = 8
QUIET_MS = 100  # the last messages of a dead engine have come when there was none for so long


@dataclass(frozen=True)
class _Running:
    engine: EngineProcess
    reader: asyncio.Task[None]
    watcher: asyncio.Task[None]
    watchdog: asyncio.Task[None]


class ProcessEngineClient(StreamingClient):
    """Spawns an engine, speaks to it, stops it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        slow_reader_timeout: float = 60.0,
        stop_timeout: float = 10.0,
        step_timeout: float = 0.0,
    ) -> None:
        """Timeouts in seconds; an engine that does not stop within `stop_timeout`, or that has work and is silent for
        `step_timeout` (0: for ever), is killed.
        """
        super().__init__(config.scheduler.max_waiting, slow_reader_timeout)
        self._config = config
        self._command = command
        self._stop_timeout = stop_timeout
        self._step_timeout = step_timeout
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._running: _Running | None = None

    @property
    def pid(self) -> int:
        """Of the engine process, once `start` was called."""
        assert self._running is not None, "the engine has not started"
        return self._running.engine.pid

    async def _launch(self) -> None:
        config_json = self._config.model_dump_json().encode()
        engine = await EngineProcess.spawn(self._command, config_json)
        engine.socket.send(self._encoder.encode(Hello()))
        reader = asyncio.create_task(self._read(engine), name="engine-reader")
        reader.add_done_callback(self._on_reader_done)
        watcher = asyncio.create_task(self._watch(engine, reader), name="engine-watcher")
        watchdog = asyncio.create_task(self._kill_when_silent(engine), name="engine-watchdog")
        self._running = _Running(engine, reader, watcher, watchdog)

    def _send(self, message: Command) -> None:
        assert self._running is not None
        self._running.engine.socket.send(self._encoder.encode(message))  # no high-water mark: never waits

    async def _shut_down(self) -> None:
        if self._running is None:
            return
        self._running.watchdog.cancel()
        self._send(Shutdown())
        await self._running.engine.stop(self._stop_timeout)
        await self._running.watcher  # which waits for the last messages
        self._running.reader.cancel()
        await asyncio.wait([self._running.reader])
        await self._running.engine.close()

    async def _read(self, engine: EngineProcess) -> None:
        while True:
            payload = await engine.socket.recv()
            await asyncio.sleep(0)  # `recv` alone does not let others run while messages are there
            self._receive(self._decoder.decode(payload))

    def _on_reader_done(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            log.error("reading from the engine failed", exc_info=error)
            self._fail(EngineUnavailableError(f"reading from the engine failed: {error}"))

    async def _watch(self, engine: EngineProcess, reader: asyncio.Task[None]) -> None:
        end = await engine.wait()
        while not reader.done() and (
            await engine.socket.poll(QUIET_MS) or time.monotonic() - self._heard_at < QUIET_MS / 1000
        ):
            await asyncio.sleep(0)  # the reader takes it, or has: then the poll that it ended found nothing
        self._fail(EngineUnavailableError(f"the engine process {end}"))

    async def _kill_when_silent(self, engine: EngineProcess) -> None:
        """A step that hangs, in a driver or on the device, cannot be ended in any other way."""
        if not self._step_timeout:
            return
        while self._seconds_without_news(time.monotonic()) < self._step_timeout:
            await asyncio.sleep(self._step_timeout / LOOKS_PER_TIMEOUT)
        engine.kill()
        self._fail(
            EngineUnavailableError(f"the engine was silent for {self._step_timeout:g} s and was killed")
        )
