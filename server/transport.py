"""grpc.aio servers: their options, and the addresses they listen on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from engine.errors import ConfigError

# What clients and proxies do with keepalive must never cost them the connection.
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),  # two servers on one port would share its connections silently
    ("grpc.max_send_message_length", -1),  # ours are bounded by what a request may ask for
]


@dataclass(frozen=True)
class Transport:
    """What holds for every connection of a server."""

    max_message_bytes: int  # gRPC answers RESOURCE_EXHAUSTED to a larger request
    keepalive_time: float = 60.0  # seconds
    keepalive_timeout: float = 20.0  # seconds; a peer that is gone is found after both
    max_connection_age: float = (
        0.0  # seconds; 0: unbounded. The streams of an old connection go on to their end
    )

    def options(self) -> list[tuple[str, int]]:
        options = [
            *_OPTIONS,
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", _milliseconds(self.keepalive_time)),
            ("grpc.keepalive_timeout_ms", _milliseconds(self.keepalive_timeout)),
            ("grpc.http2.ping_timeout_ms", _milliseconds(self.keepalive_timeout)),  # else a minute
        ]
        if self.max_connection_age:
            options.append(("grpc.max_connection_age_ms", _milliseconds(self.max_connection_age)))
        return options


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]], transport: Transport
) -> grpc.aio.Server:
    return grpc.aio.server(interceptors=interceptors, options=transport.options())


def listen(
    server: grpc.aio.Server,
    host: str,
    port: int,
    *,
    credentials: grpc.ServerCredentials | None = None,
    setting: str = "port",
) -> int:
    """Bind the port (0: a free one) and return it. Raises ConfigError, which names the setting, when that cannot
    be done.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError:  # grpcio has no narrower error, and its text does not tell the cause
        raise ConfigError(
            f"{setting}: cannot listen on {address}: it is in use, or not an address of this machine"
        ) from None


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
