"""The grpc.aio server: its options, its interceptors, and the address it listens on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from engine.errors import ConfigError

# What clients and proxies do with keepalive must never cost them the connection; a dead peer is found anyway.
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.so_reuseport", 0),  # two servers on one port would share its connections silently
    ("grpc.max_send_message_length", -1),  # ours are bounded by what a request may ask for
]


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]], *, max_message_bytes: int
) -> grpc.aio.Server:
    """`max_message_bytes` bounds a request; gRPC answers RESOURCE_EXHAUSTED to a larger one."""
    options = [*_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
    return grpc.aio.server(interceptors=interceptors, options=options)


def listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind the port (0: a free one) and return it. Raises ConfigError when that cannot be done."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server.add_insecure_port(address)
    except RuntimeError:  # grpcio has no narrower error, and its text does not tell the cause
        raise ConfigError(
            f"port: cannot listen on {address}: it is in use, or not an address of this machine"
        ) from None
