"""What every protocol of this server asks of it: whether it takes requests, to run one, and to end one.

Holds whether new generations are accepted. Knows no RPC: server/service.py and the gateway protocols translate.
"""

from __future__ import annotations

from engine.errors import EngineUnavailableError
from server.callers import current_caller
from server.generation import Backend, Generator, Sink
from server.live import LiveCalls
from server.metrics import Metrics
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.tracing import Tracing


class Serving:
    """Refuses generations until `serve`, and again from `refuse` on."""

    def __init__(
        self, live: LiveCalls, metrics: Metrics, tracing: Tracing, *, logs_content: bool = False
    ) -> None:
        self._live = live
        self._metrics = metrics
        self.logs_content = logs_content
        self._generator = Generator(live, metrics, tracing, logs_content=logs_content)
        self._backend: Backend | None = None
        self._refusal: str | None = "the engine is loading"

    @property
    def refusal(self) -> str | None:
        """Why new generations are refused; None: they are not."""
        return self._refusal

    @property
    def num_live(self) -> int:
        """Generation calls that run now."""
        return len(self._live)

    def serve(self, backend: Backend) -> None:
        self._backend = backend
        self._refusal = None

    def refuse(self, reason: str) -> None:
        """New generations fail with this reason; those that run go on."""
        self._refusal = reason

    def ready(self) -> Backend:
        """Also while draining. Raises EngineUnavailableError until there was an engine."""
        if self._backend is None:
            raise EngineUnavailableError(self._refusal or "the engine is loading")
        return self._backend

    def accepting(self) -> Backend:
        """Raises EngineUnavailableError, and counts it, while new generations are refused."""
        if self._refusal is not None:
            error = EngineUnavailableError(self._refusal)
            self._metrics.request_rejected(error.reason)
            raise error
        return self.ready()

    async def run(self, request: pb.GenerateRequest, sink: Sink, deadline: float | None) -> None:
        """Generator.run for whoever is `current_caller`."""
        await self._generator.run(self.accepting(), request, sink, deadline)

    def abort(self, request_id: str) -> bool:
        """End the choices of a live call of the current caller. False when there is nothing left to end."""
        call = self._live.find(current_caller.get().scoped(request_id))
        if call is None or call.is_aborted or self._backend is None:
            return False
        call.is_aborted = True
        aborted = self._backend.client.abort(list(call.engine_ids))
        return bool(aborted) or not call.is_submitted
