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
from dataclasses import dataclass, replace
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from engine.checkpoint.open import open_checkpoint
from engine.checkpoint.tokenizer_files import load_hf_tokenizer
from engine.client.base import EngineClient
from engine.config import ModelConfig
from engine.errors import EngineError, EngineUnavailableError
from server.admin import AdminService
from server.admission import Admission
from server.config import ServerConfig
from server.convert import RequestConverter, sampling_defaults
from server.gateway import make_gateway_protocol
from server.generation import Backend
from server.health import Health
from server.listeners import FLUSH_SECONDS, Ports, Services, listening
from server.live import LiveCalls
from server.metrics import Metrics, MetricsEndpoint
from server.progress import StartProgress
from server.restarts import Restarts
from server.service import GenerationService
from server.serving import Serving
from server.text import ChatTokenizer, TextProcessor
from server.tracing import make_tracing

EXIT_OK = 0
EXIT_ENGINE_DIED = 1
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
        restart_client: Callable[[], EngineClient] | None = None,
    ) -> None:
        """`restart_client` makes the client of the next engine when one has died; None: the server ends with it."""
        self._config = config
        self._engine_config = config.engine
        self._client = client
        self._read_files = read_files
        self._restart_client = restart_client
        self._restarts = Restarts(config.engine_restarts)
        self.registry = CollectorRegistry()
        self._metrics = Metrics(
            self.registry, self._engine_config.model.name, self._engine_config.max_speculative_tokens
        )
        self.live = LiveCalls()
        self._tracing = make_tracing(config.trace_endpoint, self._engine_config.model.name)
        self._serving = Serving(self.live, self._metrics, self._tracing, logs_content=config.log_content)
        self._service = GenerationService(self._serving, max_message_bytes=config.max_message_bytes)
        self._gateway = make_gateway_protocol(
            config.gateway_protocol, self._serving, self._engine_config.model
        )
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._admin = AdminService(drain=self._stop.set, num_running=lambda: len(self.live))
        self._health = Health(() if self._gateway is None else (self._gateway.service_name,))
        self.ports = Ports(generation=0)  # known once `on_listening` of `run` was called

    @property
    def port(self) -> int:
        return self.ports.generation

    def stop(self) -> None:
        """Once: drain and stop. Twice: stop now."""
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def run(
        self, on_listening: Callable[[], None] = lambda: None, on_loaded: Callable[[], None] = lambda: None
    ) -> int:
        """Serve until stopped; returns the exit status. Raises the EngineError that kept it from starting.

        `on_loaded` is called once, before anything is served.
        """
        with _on_signals(self.stop), self._metrics_endpoint():
            starting = asyncio.create_task(self._start())
            try:
                await asyncio.sleep(0)  # let it spawn the engine process: that comes before gRPC has threads
                async with self._listeners(), self._slow_reader_watch():
                    on_listening()
                    return await self._serve(starting, on_loaded)
            finally:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                # Side by side: either may take seconds, and whoever stops us waits so long only.
                await asyncio.gather(self._client.stop(), asyncio.to_thread(self._tracing.close))
                self._metrics.engine_stopped()

    # ---- phases --------------------------------------------------------------------------------------------

    async def _start(self) -> Backend:
        """Engine and tokenizer, side by side."""
        config = self._engine_config
        with StartProgress() as progress:
            try:
                async with asyncio.TaskGroup() as group:
                    reading = group.create_task(asyncio.to_thread(self._read_files, config.model))
                    if self._gateway is not None:
                        group.create_task(self._gateway.load())
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
            max_prompt_tokens=self._config.max_prompt_tokens,
            default_speculator=lambda: self._client.model_info.default_speculator,
        )
        admission = Admission(
            lambda: self._client.stats,
            max_waiting=config.scheduler.max_waiting,
            max_running=config.scheduler.max_num_seqs,
            max_time_to_first_token=self._config.max_time_to_first_token,
        )
        return Backend(self._client, text, converter, admission)

    async def _serve(self, starting: asyncio.Task[Backend], on_loaded: Callable[[], None]) -> int:
        async with _waiting(self._stop.wait()) as stopped:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():  # the engine may have got the same signal
                _log.info("stopped before the engine was ready")
                return EXIT_OK
            backend = starting.result()
            on_loaded()
            with contextlib.closing(backend.text):
                while True:
                    await self._become_ready(backend)
                    async with _waiting(self._client.wait_failed()) as failed:
                        await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
                        if not failed.done():
                            await self._drain(failed)
                        failure = failed.result() if failed.done() else None
                    if failure is None or stopped.done():
                        return await self._end(failure)
                    if not await self._restart(failure, stopped):
                        return await self._end(None if stopped.done() else failure)
                    backend = replace(backend, client=self._client)

    async def _become_ready(self, backend: Backend) -> None:
        info = self._client.model_info
        self._client.on_step(self._metrics.on_step)
        backend.admission.engine_started()
        self._client.on_step(backend.admission.on_step)
        if self._gateway is not None:
            self._gateway.engine_started(self._client)
        self._metrics.engine_started(lambda: self._client.stats, info.startup_seconds)
        self._metrics.admission_started(backend.admission.estimate)
        self._serving.serve(backend)
        self._admin.serve(self._client)
        self._restarts.engine_serves()
        await self._health.set_ready(True)
        _log.info(
            "serving", model=info.model_name, host=self._config.host, port=self.port, device=info.device
        )

    async def _restart(self, failure: EngineError, stopped: asyncio.Future[Any]) -> bool:
        """End what ran on the dead engine and start another one. False: given up, or stopped meanwhile."""
        if self._restart_client is None:
            return False
        while (delay := self._restarts.next_delay()) is not None:
            _log.error(
                "engine died, starting another", reason=failure.reason, error=str(failure), delay=delay
            )
            await self._engine_is_gone("the engine is being restarted")
            await self._client.stop()
            await asyncio.wait({stopped}, timeout=delay)
            if stopped.done():
                return False
            self._client = self._restart_client()
            async with _waiting(self._client.start()) as starting:
                await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    return False
                error = starting.exception()
            if error is None:
                return True
            if not isinstance(error, EngineError):
                raise error
            failure = error
        return False

    async def _engine_is_gone(self, reason: str) -> None:
        """Not ready, whatever ran has ended, and new requests are refused with the reason."""
        await self._health.set_ready(False)
        self._metrics.engine_stopped()
        self._serving.refuse(reason)
        await self.live.end_all(EngineUnavailableError("the engine died"), timeout=FLUSH_SECONDS)

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
            self._serving.refuse("the server is draining")
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
        self._serving.refuse(reason)
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
    async def _listeners(self) -> AsyncIterator[None]:
        await self._health.set_ready(False)
        await self._health.set_alive(True)
        services = Services(self._service, self._admin, self._health, self._gateway, self._tracing)
        async with listening(self._config, services, self.registry, self._note_ports):
            yield

    def _note_ports(self, ports: Ports) -> None:
        self.ports = ports

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
