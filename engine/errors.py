"""Every error that a user, a checkpoint or the environment can cause.

This file knows nothing of gRPC: `server/errors.py` holds the one table that maps these classes to status codes.
Messages say what was wrong, what was got and what was expected, and are safe to show to a client.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class. `reason` is a stable machine-readable name (google.rpc.ErrorInfo.reason)."""

    reason = "ENGINE_ERROR"


class InvalidRequestError(EngineError):
    """A field of a request is out of bounds or not supported. Nothing was started."""

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class RequestIdInUseError(InvalidRequestError):
    """The request id is that of a live request."""

    reason = "REQUEST_ID_IN_USE"

    def __init__(self, request_id: str) -> None:
        super().__init__("request_id", f"got {request_id!r}, which a live request has; expected a unique id")


class UnknownModelError(EngineError):
    """The request names a model that this server does not serve."""

    reason = "UNKNOWN_MODEL"


class QueueFullError(EngineError):
    """The bounded waiting queue is full; try again after `retry_after` seconds."""

    reason = "QUEUE_FULL"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LateError(QueueFullError):
    """The first token would come too late for the request's deadline, or later than the server promises."""

    reason = "TOO_LATE"


class CallerLimitError(QueueFullError):
    """The caller uses all that its token allows."""

    reason = "CALLER_LIMIT"


class UnauthenticatedError(EngineError):
    """The call has no token, or one that is not known."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(EngineError):
    """The caller is known, and may not do this."""

    reason = "PERMISSION_DENIED"


class EngineUnavailableError(EngineError):
    """The engine is loading, draining or dead."""

    reason = "ENGINE_UNAVAILABLE"


class RequestFailedError(EngineError):
    """The engine could not go on with this request (for example NaN logits). Others are not touched."""

    reason = "REQUEST_FAILED"


class SlowReaderError(EngineError):
    """The client did not read its stream for longer than the configured time; the request was ended."""

    reason = "SLOW_READER"


class ConfigError(EngineError):
    """A flag, an environment variable, a file or a combination of them is wrong. Raised at start."""

    reason = "CONFIG"


class CheckpointError(EngineError):
    """A checkpoint is missing, corrupt, or does not hold what its config promises. Raised at start."""

    reason = "CHECKPOINT"
