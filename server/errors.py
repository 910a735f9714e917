"""The one table from engine errors to gRPC statuses, with google.rpc details.

Knows no RPC and no request: the interceptor asks it for the status of whatever a handler raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from engine.errors import (
    CallerLimitError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    PermissionDeniedError,
    QueueFullError,
    RequestFailedError,
    RequestIdInUseError,
    SlowReaderError,
    UnauthenticatedError,
    UnknownModelError,
)

DOMAIN = "slipstream"  # google.rpc.ErrorInfo.domain
INTERNAL_MESSAGE = "internal error"
# UTF-8, of a text that may quote the request. A status travels as headers, of which clients take some 8 KiB: its
# message percent-encoded, three times as long at worst, and again with the details in base64.
MAX_TEXT_BYTES = 600
RETRY_UNAVAILABLE = 1.0  # seconds; a balancer has another server, or this one is about to be ready

Details = Callable[[EngineError], Iterable[Message]]


def _nothing(error: EngineError) -> Iterable[Message]:
    return ()


def _bad_request(error: EngineError) -> Iterable[Message]:
    assert isinstance(error, InvalidRequestError)
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=short(error.field), description=short(error.description)
    )
    return (error_details_pb2.BadRequest(field_violations=[violation]),)


def _retry_when_told(error: EngineError) -> Iterable[Message]:
    assert isinstance(error, QueueFullError)
    return (_retry_info(error.retry_after),)


def _quota(error: EngineError) -> Iterable[Message]:
    violation = error_details_pb2.QuotaFailure.Violation(subject="token", description=short(str(error)))
    return (*_retry_when_told(error), error_details_pb2.QuotaFailure(violations=[violation]))


def _retry_soon(error: EngineError) -> Iterable[Message]:
    return (_retry_info(RETRY_UNAVAILABLE),)


def _retry_info(seconds: float) -> Message:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    info: Message = error_details_pb2.RetryInfo(retry_delay=delay)
    return info


# A class that is not here has the status of its nearest base; EngineError itself is the last resort.
STATUSES: dict[type[EngineError], tuple[grpc.StatusCode, Details]] = {
    InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, _bad_request),
    RequestIdInUseError: (grpc.StatusCode.ALREADY_EXISTS, _bad_request),
    UnknownModelError: (grpc.StatusCode.NOT_FOUND, _nothing),
    UnauthenticatedError: (grpc.StatusCode.UNAUTHENTICATED, _nothing),
    PermissionDeniedError: (grpc.StatusCode.PERMISSION_DENIED, _nothing),
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, _retry_when_told),
    CallerLimitError: (grpc.StatusCode.RESOURCE_EXHAUSTED, _quota),
    SlowReaderError: (grpc.StatusCode.RESOURCE_EXHAUSTED, _nothing),
    EngineUnavailableError: (grpc.StatusCode.UNAVAILABLE, _retry_soon),
    RequestFailedError: (grpc.StatusCode.INTERNAL, _nothing),
    EngineError: (grpc.StatusCode.INTERNAL, _nothing),
}


def status_of(error: Exception) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """Code and rich status for a client. Of anything but an EngineError, the client learns nothing."""
    if not isinstance(error, EngineError):
        return grpc.StatusCode.INTERNAL, _status(grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE, "INTERNAL", ())
    code, details = next(STATUSES[base] for base in type(error).__mro__ if base in STATUSES)
    return code, _status(code, str(error), error.reason, details(error))


def short(text: str) -> str:
    """The text, or as much of its beginning as a status may say."""
    encoded = text.encode()
    if len(encoded) <= MAX_TEXT_BYTES:
        return text
    return encoded[:MAX_TEXT_BYTES].decode(errors="ignore") + " ..."


def _status(
    code: grpc.StatusCode, message: str, reason: str, details: Iterable[Message]
) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=short(message))
    for detail in (error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN), *details):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status
