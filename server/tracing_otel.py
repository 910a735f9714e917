"""Spans of OpenTelemetry: one for each call, below it queue, prefill and decode of each choice; sent over OTLP/HTTP.

A call continues the trace that its metadata names (W3C `traceparent`). The spans of a choice are made when it has
ended, from the stamps that the engine took: nothing is done for them while tokens flow. Never a prompt or an output.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from structlog.contextvars import bind_contextvars

from engine.messages import RequestTimes
from server.choice import SpeculationTotals
from server.interceptors import Handler, run_to_status, wrap
from server.tracing import Tracing
from server.version import slipstream_version

EXPORT_TIMEOUT = 5.0  # seconds
NANOSECONDS = 1e9
_UNTRACED = ("grpc.health.v1.Health",)  # asked every second by everybody
_SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)  # those that OpenTelemetry's conventions call errors of a server


class OtelTracing(Tracing):
    """A provider of its own. What shares of calls are traced, and further attributes, are told by the variables of
    OpenTelemetry (OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES).
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        resource = Resource.create({"service.name": "slipstream", "service.version": slipstream_version()})
        self._model_name = model_name
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT))
        )
        self._tracer = self._provider.get_tracer("slipstream")

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:  # type: ignore[type-arg]
        return (TracingInterceptor(self._tracer),)

    def choice_ended(
        self,
        engine_id: str,
        finish_reason: str | None,
        *,
        num_prompt_tokens: int,
        num_tokens: int,
        times: RequestTimes,
        speculation: SpeculationTotals,
    ) -> None:
        call = trace.get_current_span()
        if finish_reason is None or not call.is_recording():
            return
        call.set_attributes(
            {"gen_ai.request.model": self._model_name, "gen_ai.usage.input_tokens": num_prompt_tokens}
        )
        attributes: dict[str, dict[str, Any]] = {
            "queue": {},
            "prefill": {"gen_ai.usage.input_tokens": num_prompt_tokens},
            "decode": {"gen_ai.usage.output_tokens": num_tokens, **_acceptance(speculation)},
        }
        offset = time.time() - time.monotonic()
        phases = list(phases_of(times, time.monotonic()))
        for phase in phases:
            name, start, end = phase
            span = self._tracer.start_span(
                name,
                start_time=_nanoseconds(start + offset),
                attributes={"slipstream.choice_id": engine_id, **attributes[name]},
            )
            if phase is phases[-1]:
                span.set_attribute("gen_ai.response.finish_reasons", [finish_reason])
            span.end(_nanoseconds(end + offset))

    def close(self) -> None:
        self._provider.shutdown()


class TracingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """A span around every handler, current inside it."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if method.strip("/").rpartition("/")[0] in _UNTRACED:
            return handler
        return wrap(handler, method, self._around)

    def _around(self, path: str, handler: Handler) -> Handler:
        service, _, method = path.strip("/").rpartition("/")

        async def traced(request: Any, context: Any) -> Any:
            metadata = dict(context.invocation_metadata() or ())
            with self._tracer.start_as_current_span(
                f"{service}/{method}",
                context=self._propagator.extract(metadata),
                kind=trace.SpanKind.SERVER,
                attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
                record_exception=False,  # it may quote the request
                set_status_on_exception=False,
            ) as span:
                if span.is_recording():
                    bind_contextvars(trace_id=trace.format_trace_id(span.get_span_context().trace_id))
                return await run_to_status(handler, request, context, lambda code: _end(span, code))

        return traced


def phases_of(times: RequestTimes, now: float) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of those that were begun; the last one of a request that was cut short ends now."""
    stamps = (times.arrival, times.first_scheduled, times.first_token, times.last_token)
    for name, start, end in zip(("queue", "prefill", "decode"), stamps, stamps[1:], strict=False):
        if start:
            yield name, start, end or now


def _end(span: trace.Span, code: grpc.StatusCode) -> None:
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code in _SERVER_FAULTS:
        span.set_status(trace.StatusCode.ERROR, code.name)


def _acceptance(speculation: SpeculationTotals) -> dict[str, Any]:
    """Empty for a choice without drafts."""
    if not speculation.num_verifications:
        return {}
    stats = speculation.to_proto()
    return {
        "slipstream.speculation.method": stats.method,
        "slipstream.speculation.verifications": stats.verifications,
        "slipstream.speculation.draft_tokens": stats.draft_tokens,
        "slipstream.speculation.accepted_tokens": stats.accepted_tokens,
        "slipstream.speculation.acceptance_length": stats.acceptance_length,
        "slipstream.speculation.accepted_per_position": list(stats.accepted_per_position),
        "slipstream.speculation.offered_per_position": list(stats.offered_per_position),
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * NANOSECONDS)
