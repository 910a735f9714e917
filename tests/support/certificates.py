"""Certificates for tests of TLS, made by an authority of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import trustme
from grpc_health.v1 import health_pb2

from tests.support.server_fixture import RunningServer

SERVER_NAME = "localhost"
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)


def write_server_files(
    folder: Path, authority: trustme.CA, *, clients: trustme.CA | None = None, expired: bool = False
) -> dict[str, Path]:
    """A certificate for SERVER_NAME, as options of ServerConfig. Files that are there are replaced."""
    issued = issue(authority, SERVER_NAME, expired=expired)
    files = {"tls_cert": folder / "server.pem", "tls_key": folder / "server.key"}
    issued.private_key_pem.write_to_path(files["tls_key"])
    files["tls_cert"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    if clients is not None:
        files["tls_client_ca"] = folder / "clients.pem"
        clients.cert_pem.write_to_path(files["tls_client_ca"])
    return files


def client_credentials(trusted: trustme.CA, own: trustme.LeafCert | None = None) -> grpc.ChannelCredentials:
    """What a client trusts, and what it shows."""
    if own is None:
        return grpc.ssl_channel_credentials(trusted.cert_pem.bytes())
    chain = b"".join(blob.bytes() for blob in own.cert_chain_pems)
    return grpc.ssl_channel_credentials(trusted.cert_pem.bytes(), own.private_key_pem.bytes(), chain)


def issue(authority: trustme.CA, name: str, *, expired: bool = False) -> trustme.LeafCert:
    now = datetime.now(UTC)
    return authority.issue_cert(
        name,
        not_before=now - timedelta(days=30),
        not_after=now - timedelta(days=1) if expired else now + timedelta(days=30),
    )


@asynccontextmanager
async def channel_to(server: RunningServer, credentials: grpc.ChannelCredentials) -> AsyncIterator[Any]:
    target = f"{SERVER_NAME}:{server.app.port}"
    async with grpc.aio.secure_channel(target, credentials, options=[OWN_CONNECTION]) as channel:
        yield channel


async def wait_until_serving(server: RunningServer, credentials: grpc.ChannelCredentials) -> None:
    """Of a server whose own channel, which is plain, cannot tell."""
    async with channel_to(server, credentials) as channel:
        plain, server.channel = server.channel, channel
        await server.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
        server.channel = plain
