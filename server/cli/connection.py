"""What the client-side commands share: the address option, the channel, and how a failed call is told.

A failed call is one line on stderr and an exit status, never a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, cast

import grpc
import typer
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

EXIT_FAILED = 1  # the server refused the request, or it failed
EXIT_UNAVAILABLE = 3  # nobody answers, or the server is loading or draining
EXIT_INTERRUPTED = 130  # Ctrl-C

DEFAULT_ADDRESS = "127.0.0.1:50051"

AddressOption = Annotated[
    str,
    typer.Option("--address", "-a", envvar="SLIPSTREAM_ADDRESS", help="host:port of a running server."),
]


@contextmanager
def open_channel(address: str) -> Iterator[grpc.Channel]:
    """Connect to `address`. A failed call inside the block ends the command with one line."""
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise failed_call(error, address) from None


def failed_call(error: grpc.RpcError, address: str) -> typer.Exit:
    """Tell what went wrong; returns the exit to raise."""
    typer.echo(f"error: {describe(error)} (from {address})", err=True)
    unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
    return typer.Exit(EXIT_UNAVAILABLE if unavailable else EXIT_FAILED)


def describe(error: grpc.RpcError) -> str:
    """The status with its message, the fields that were wrong, and when to try again, in one line."""
    message = " ".join((error.details() or "").split())
    parts = [message] if message else []
    status = rpc_status.from_call(cast(grpc.Call, error))  # every failed call is a Call too
    for detail in status.details if status is not None else ():
        parts += [part for part in _describe_detail(detail) if part not in message]
    return f"{error.code().name}: {'; '.join(parts)}"


def _describe_detail(detail: any_pb2.Any) -> list[str]:
    if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
        bad_request = error_details_pb2.BadRequest()
        detail.Unpack(bad_request)
        return [f"{violation.field}: {violation.description}" for violation in bad_request.field_violations]
    if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
        retry = error_details_pb2.RetryInfo()
        detail.Unpack(retry)
        return [f"try again after {retry.retry_delay.ToTimedelta().total_seconds():g} s"]
    return []
