"""What the client-side commands share: the options that say how to connect, and how a failed call is told.

A failed call is one line on stderr and an exit status, never a traceback.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import grpc
import typer
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from engine.errors import ConfigError
from server.client import Connection

EXIT_FAILED = 1  # the server refused the request, or it failed
EXIT_UNAVAILABLE = 3  # nobody answers, or the server is loading or draining
EXIT_INTERRUPTED = 130  # Ctrl-C

DEFAULT_ADDRESS = "127.0.0.1:50051"

_PANEL = "Connection"


def _file_option(flag: str, text: str) -> Any:
    envvar = f"SLIPSTREAM_{flag.removeprefix('--').replace('-', '_').upper()}"
    return Annotated[Path | None, typer.Option(flag, envvar=envvar, help=text, rich_help_panel=_PANEL)]


_OPTIONS: dict[str, tuple[Any, str | None]] = {  # field of a Connection -> annotation, default
    "address": (
        Annotated[
            str,
            typer.Option(
                "--address",
                "-a",
                envvar="SLIPSTREAM_ADDRESS",
                help="host:port of a running server.",
                rich_help_panel=_PANEL,
            ),
        ],
        DEFAULT_ADDRESS,
    ),
    "token": (
        Annotated[
            str | None,
            typer.Option(
                "--token",
                envvar="SLIPSTREAM_TOKEN",
                help="Bearer token. Others may see command lines: use the variable.",
                rich_help_panel=_PANEL,
            ),
        ],
        None,
    ),
    "tls_ca": (
        _file_option("--tls-ca", "Authorities (PEM) of the server's certificate; turns TLS on."),
        None,
    ),
    "client_cert": (_file_option("--client-cert", "Certificate (PEM) to show the server."), None),
    "client_key": (_file_option("--client-key", "Its private key (PEM)."), None),
}


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `connection` is made of options."""

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        connection = Connection(**{name: arguments.pop(name) for name in _OPTIONS})
        try:
            command(connection=connection, **arguments)
        except BrokenPipeError:
            raise  # typer ends quietly: whoever read has seen enough
        except OSError as error:  # calls have their own errors: this is what we write, or read from stdin
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(EXIT_FAILED) from None

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "connection"]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
    return run


@contextmanager
def open_channel(connection: Connection) -> Iterator[grpc.Channel]:
    """Connect. A failed call inside the block, or a file that cannot be read, ends the command with one line."""
    with failures_told(connection), connection.channel() as channel:
        yield channel


@contextmanager
def failures_told(connection: Connection) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise failed_call(error, connection.address) from None
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


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
