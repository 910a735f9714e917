"""Lets nobody in without a token: what surrounds every call of a listener that has tokens.

A method is open only if it is listed here. A handler finds its caller in `current_caller`.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from structlog.contextvars import bind_contextvars

from engine.errors import EngineError
from server.callers import Authenticate, current_caller
from server.errors import status_of

OPEN_SERVICES = (
    health.SERVICE_NAME,
    reflection.SERVICE_NAME,
)  # for probes and tools; they tell nothing of requests


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Closest to the handler: what surrounds it counts and logs refused calls like all others."""

    def __init__(self, authenticate: Authenticate, *, needs_admin: bool = False) -> None:
        self._authenticate = authenticate
        self._needs_admin = needs_admin

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or _service_of(handler_call_details.method) in OPEN_SERVICES:
            return handler
        try:
            caller = self._authenticate(dict(handler_call_details.invocation_metadata))
            if self._needs_admin:
                caller.require_admin()
        except EngineError as error:
            return _refusing(handler, error)
        # This is the task that will run the handler.
        current_caller.set(caller)
        bind_contextvars(tenant=caller.tenant)
        return handler


def _service_of(method: str) -> str:
    return method.strip("/").rpartition("/")[0]


def _refusing(handler: Any, error: EngineError) -> Any:
    """A handler of the same shape that ends its call with the error."""
    _, status = status_of(error)

    async def refuse(request: Any, context: Any) -> None:
        await context.abort_with_status(rpc_status.to_status(status))

    requests = "stream" if handler.request_streaming else "unary"
    responses = "stream" if handler.response_streaming else "unary"
    make = getattr(grpc, f"{requests}_{responses}_rpc_method_handler")
    return make(refuse, None, handler.response_serializer)  # nobody reads the request
