"""The seam for traces of requests: what is told, and the one that tells nobody, which a server has by default.

Knows no OpenTelemetry: server/tracing_otel.py does, and is imported only when there is somewhere to send spans to.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from engine.errors import ConfigError
from engine.messages import RequestTimes
from server.choice import SpeculationTotals


class Tracing:
    """Traces nothing."""

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:  # type: ignore[type-arg]
        """What surrounds the handlers of a server."""
        return ()

    def choice_ended(
        self,
        engine_id: str,
        finish_reason: str | None,  # None: the engine refused it
        *,
        num_prompt_tokens: int,
        num_tokens: int,
        times: RequestTimes,
        speculation: SpeculationTotals,
    ) -> None:
        """However it ended; called inside the call that it belongs to."""

    def close(self) -> None:
        """Send what is left. Takes seconds where nobody listens."""


def make_tracing(endpoint: str | None, model_name: str) -> Tracing:
    """Raises ConfigError when the packages are not there, or nothing could ever be sent."""
    if endpoint is None:
        return Tracing()
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"trace_endpoint: got {endpoint!r}, expected a URL such as http://127.0.0.1:4318/v1/traces"
        )
    try:
        from server.tracing_otel import OtelTracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ConfigError(
            f"trace_endpoint: got {endpoint!r} without the packages of OpenTelemetry; "
            "expected them to be installed: pip install -e '.[tracing]' in the repository"
        ) from None
    return OtelTracing(endpoint, model_name)
