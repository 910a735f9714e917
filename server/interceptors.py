"""What surrounds every call: counting and logging it, and turning what a handler raises into a status.

Handlers are coroutines that write their messages, so nothing here runs once per message. The one that reads a stream
of requests (server reflection) is made such a coroutine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry, Counter, Histogram
from structlog.contextvars import bind_contextvars, get_contextvars

from engine.errors import EngineError, InvalidRequestError
from server.errors import short, status_of

Context = Any  # grpc.aio.ServicerContext; its stubs lack abort_with_status
Handler = Callable[[Any, Context], Awaitable[Any]]
Deserialize = Callable[[bytes], Any]
Wrapper = Callable[[str, Handler], Handler]  # method path, behaviour -> behaviour
HANDLING_BUCKETS = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)  # fmt: skip
MAX_DEADLINE_SKEW_SECONDS = 0.02  # a call's way to the server

_UNREADABLE = object()  # in place of a request

_log = structlog.get_logger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """EngineErrors become the status of server/errors.py; anything else is INTERNAL, told only to the log."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        return wrap(await continuation(handler_call_details), handler_call_details.method, self._around)

    @staticmethod
    def _around(method: str, handler: Handler) -> Handler:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                return await handler(request, context)
            except grpc.aio.AbortError:  # the handler has said its status itself
                raise
            except (
                grpc.aio.InternalError
            ):  # a message did not go out: the client has just left, as grpcio knows
                raise
            except EngineError as error:
                failure: Exception = error
                _bind_reason(error)
            except Exception as error:  # the process boundary: nothing of it reaches the client
                _log.exception("handler failed", method=method)
                failure = error
            _, status = status_of(failure)
            return await context.abort_with_status(rpc_status.to_status(status))  # raises

        return guarded


class UnreadableInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Bytes that are no message of the method's type are INVALID_ARGUMENT. By itself, grpcio answers UNKNOWN before any
    handler runs, and writes a traceback for each. Goes after those that ask who calls.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        around = self._around_stream if handler is not None and handler.request_streaming else self._around
        return wrap(handler, handler_call_details.method, around, read=self._read)

    @staticmethod
    def _read(deserialize: Deserialize) -> Deserialize:
        def read(data: bytes) -> Any:
            try:
                return deserialize(data)
            except DecodeError:
                return _UNREADABLE

        return read

    @staticmethod
    def _around(method: str, handler: Handler) -> Handler:
        async def guarded(request: Any, context: Context) -> Any:
            return await handler(_readable(request), context)

        return guarded

    @staticmethod
    def _around_stream(method: str, handler: Any) -> Handler:
        async def guarded(requests: AsyncIterator[Any], context: Context) -> None:
            readable = (_readable(request) async for request in requests)
            async for response in handler(readable, context):
                await context.write(response)

        return guarded


def _readable(request: Any) -> Any:
    if request is _UNREADABLE:
        raise InvalidRequestError("request", "cannot be parsed")
    return request


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Counts every call, and logs it when it is over: at level info where the handler bound a request id."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_service", "grpc_method")
        self._started = Counter("grpc_server_started", "Calls begun.", labels, registry=registry)
        self._handled = Counter(
            "grpc_server_handled", "Calls ended, by status.", (*labels, "grpc_code"), registry=registry
        )
        self._seconds = Histogram(
            "grpc_server_handling_seconds",
            "Seconds from the begin to the end of a call.",
            labels,
            buckets=HANDLING_BUCKETS,
            registry=registry,
        )

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        return wrap(await continuation(handler_call_details), handler_call_details.method, self._around)

    def _around(self, path: str, handler: Handler) -> Handler:
        service, method = path.strip("/").split("/")

        async def counted(request: Any, context: Context) -> Any:
            self._started.labels(service, method).inc()
            begun = time.monotonic()

            def ended(code: grpc.StatusCode) -> None:
                seconds = time.monotonic() - begun
                self._handled.labels(service, method, code.name).inc()
                self._seconds.labels(service, method).observe(seconds)
                level = logging.INFO if "request_id" in get_contextvars() else logging.DEBUG
                _log.log(level, "call ended", method=method, status=code.name, seconds=round(seconds, 6))

            return await run_to_status(handler, request, context, ended)

        return counted


async def run_to_status(
    handler: Handler, request: Any, context: Context, on_end: Callable[[grpc.StatusCode], None]
) -> Any:
    """Run a handler, and tell the status that its call ends with, however it does."""
    timeout = context.time_remaining()
    code = grpc.StatusCode.CANCELLED  # unless the handler comes to an end
    try:
        response = await handler(request, context)
        code = context.code() or grpc.StatusCode.OK
        return response
    except grpc.aio.AbortError:
        code = context.code()
        raise
    finally:
        if code is grpc.StatusCode.CANCELLED and _is_deadline(timeout, context.time_remaining()):
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        on_end(code)


def _is_deadline(timeout: float | None, remaining: float | None) -> bool:
    """Whether a call was cancelled by its deadline. It passes at the client first, which then resets the stream: the
    server's own began when the call arrived, and gRPC rounds what it sends of it up, by as much as 1 %.
    """
    if timeout is None or remaining is None:
        return False
    return remaining <= MAX_DEADLINE_SKEW_SECONDS + 0.01 * timeout


def _bind_reason(error: EngineError) -> None:
    """For the log of the call. What an invalid request holds may be a prompt: its words are not logged."""
    if isinstance(error, InvalidRequestError):
        bind_contextvars(reason=error.reason, field=error.field)
    else:
        bind_contextvars(reason=error.reason, error=short(str(error)))


def wrap(
    handler: Any,
    method: str,
    wrapper: Wrapper,
    *,
    read: Callable[[Deserialize], Deserialize] = lambda deserialize: deserialize,
) -> Any:
    """The handler with its behaviour (and the reading of requests) wrapped; None (no such method) stays as it is."""
    if handler is None:
        return None
    requests = "stream" if handler.request_streaming else "unary"
    responses = "stream" if handler.response_streaming else "unary"
    behaviour = getattr(handler, f"{requests}_{responses}")
    make = getattr(grpc, f"{requests}_{responses}_rpc_method_handler")
    return make(wrapper(method, behaviour), read(handler.request_deserializer), handler.response_serializer)
