"""Wiring and lifecycle of the server: load, serve, drain, stop.

The listener opens while the engine still loads (liveness SERVING, readiness NOT_SERVING). The states follow
one another in `App.run`; nothing here knows what a request is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from engine.checkpoint.open import open_checkpoint
from engine.checkpoint.tokenizer_files import load_hf_tokenizer
from engine.client.base import EngineClient
from engine.config import ModelConfig
from engine.errors import EngineError, EngineUnavailableError
from server.config import ServerConfig
from server.convert import RequestConverter, sampling_defaults
from server.generation import Backend
from server.health import HEALTH_SERVICE_NAME, Health
from server.interceptors import CallInterceptor, ErrorInterceptor
from server.live import LiveCalls
from server.metrics import Metrics, MetricsEndpoint
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from server.progress import StartProgress
from server.service import SERVICE_NAME, GenerationService
from server.text import ChatTokenizer, TextProcessor
from server.transport import listen, make_server

EXIT_OK = 0
EXIT_ENGINE_DIED = 1
FLUSH_SECONDS = 0.5  # for the last statuses to leave; health watchers would hold the server longer

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """What the frontend itself reads of a checkpoint."""

    tokenizer: ChatTokenizer
    generation_config: Mapping[str, Any]


def read_model_files(config: ModelConfig) -> ModelFiles:
    """Takes seconds: transformers is imported. Raises CheckpointError."""
    return ModelFiles(load_hf_tokenizer(config), open_checkpoint(config).generation_config())


class App:
    """One server process. `stop` may be called from a signal handler."""

    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        read_files: Callable[[ModelConfig], ModelFiles] = read_model_files,
    ) -> None:
        self._config = config
        self._engine_config = config.engine
        self._client = client
        self._read_files = read_files
        self.registry = CollectorRegistry()
        self._metrics = Metrics(
            self.registry, self._engine_config.model.name, self._engine_config.max_speculative_tokens
        )
        self.live = LiveCalls()
        self._service = GenerationService(
            self.live, self._metrics, max_message_bytes=config.max_message_bytes
        )
        self._health = Health()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self.port = 0  # known once `on_listening` of `run` was called

    def stop(self) -> None:
        """Once: drain and stop. Twice: stop now."""
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def run(self, on_listening: Callable[[], None] = lambda: None) -> int:
        """Serve until stopped; returns the exit status. Raises the EngineError that kept it from starting."""
        with _on_signals(self.stop), self._metrics_endpoint():
            starting = asyncio.create_task(self._start())
            await asyncio.sleep(0)  # let it spawn the engine process: that comes before gRPC has threads
            try:
                async with self._listener(), self._slow_reader_watch():
                    on_listening()
                    return await self._serve(starting)
            finally:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                await self._client.stop()
                self._metrics.engine_stopped()

    # ---- phases --------------------------------------------------------------------------------------------

    async def _start(self) -> Backend:
        """Engine and tokenizer, side by side."""
        config = self._engine_config
        with StartProgress() as progress:
            try:
                async with asyncio.TaskGroup() as group:
                    reading = group.create_task(asyncio.to_thread(self._read_files, config.model))
                    await self._client.start(progress)
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        files = reading.result()
        text = TextProcessor(files.tokenizer)
        converter = RequestConverter(
            self._client.model_info,
            text,
            sampling_defaults=sampling_defaults(files.generation_config),
            speculator_limits={speculator.method: speculator.k for speculator in config.speculators},
        )
        return Backend(self._client, text, converter)

    async def _serve(self, starting: asyncio.Task[Backend]) -> int:
        async with _waiting(self._stop.wait()) as stopped:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                _log.info("stopped before the engine was ready")
                return EXIT_OK
            backend = starting.result()
            try:
                await self._become_ready(backend)
                async with _waiting(self._client.wait_failed()) as failed:
                    await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
                    if not failed.done():
                        await self._drain(failed)
                    return await self._end(failed.result() if failed.done() else None)
            finally:
                backend.text.close()

    async def _become_ready(self, backend: Backend) -> None:
        info = self._client.model_info
        self._client.on_step(self._metrics.on_step)
        self._metrics.engine_started(lambda: self._client.stats, info.startup_seconds)
        self._service.serve(backend)
        await self._health.set_ready(True)
        _log.info(
            "serving", model=info.model_name, host=self._config.host, port=self.port, device=info.device
        )

    async def _drain(self, failed: asyncio.Future[EngineError]) -> None:
        """Not ready; accept for the drain delay; then let what runs finish within the grace time."""
        _log.info(
            "draining", running=len(self.live), delay=self._config.drain_delay, grace=self._config.grace
        )
        await self._health.set_ready(False)
        async with _waiting(self._stop_now.wait()) as stop_now:
            await asyncio.wait(
                {failed, stop_now}, timeout=self._config.drain_delay, return_when=asyncio.FIRST_COMPLETED
            )
            self._service.refuse("the server is draining")
            async with _waiting(self.live.wait_until_empty()) as drained:
                await asyncio.wait(
                    {failed, stop_now, drained},
                    timeout=self._config.grace,
                    return_when=asyncio.FIRST_COMPLETED,
                )

    async def _end(self, failure: EngineError | None) -> int:
        """End what still runs, with its reason. Of a dead engine the log says more than clients learn."""
        reason = "the server stopped"
        if failure is not None:
            reason = "the engine died"
            _log.error("engine died", reason=failure.reason, error=str(failure))
            await self._health.set_ready(False)
            await self._health.set_alive(False)
            self._metrics.engine_stopped()
        elif self.live:
            _log.warning("cutting requests that still run", running=len(self.live))
        self._service.refuse(reason)
        await self.live.end_all(EngineUnavailableError(reason), timeout=FLUSH_SECONDS)
        return EXIT_OK if failure is None else EXIT_ENGINE_DIED

    # ---- parts ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _metrics_endpoint(self) -> Iterator[None]:
        if not self._config.metrics_port:
            yield
            return
        with MetricsEndpoint(self.registry, self._config.host, self._config.metrics_port):
            yield

    @contextlib.asynccontextmanager
    async def _listener(self) -> AsyncIterator[None]:
        interceptors = (CallInterceptor(self.registry), ErrorInterceptor())
        server = make_server(interceptors, max_message_bytes=self._config.max_message_bytes)
        pb_grpc.add_GenerationServiceServicer_to_server(self._service, server)
        self._health.add_to(server)
        names = (SERVICE_NAME, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self.port = listen(server, self._config.host, self._config.port)
        await self._health.set_ready(False)
        await self._health.set_alive(True)
        await server.start()
        try:
            yield
        finally:
            await server.stop(FLUSH_SECONDS)

    @contextlib.asynccontextmanager
    async def _slow_reader_watch(self) -> AsyncIterator[None]:
        timeout = self._config.slow_reader_timeout

        async def watch() -> None:
            while True:
                await asyncio.sleep(min(timeout / 4, 5.0))
                self.live.end_slow_readers(time.monotonic(), timeout)

        async with _waiting(watch()):
            yield


@contextlib.asynccontextmanager
async def _waiting(awaitable: Any) -> AsyncIterator[asyncio.Future[Any]]:
    """The awaitable as a future, cancelled at the end of the block."""
    future = asyncio.ensure_future(awaitable)
    try:
        yield future
    finally:
        future.cancel()


@contextlib.contextmanager
def _on_signals(callback: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
