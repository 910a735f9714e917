"""The ports of a server process and what each of them offers: generation, a gateway's protocol alone, health alone,
administration.

Knows which interceptors and credentials belong to which port, and nothing of what the services do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from server.admin import ADMIN_SERVICE_NAME
from server.auth import AuthInterceptor
from server.callers import GATEWAY, Callers
from server.config import ServerConfig
from server.gateway import GatewayProtocol
from server.health import HEALTH_SERVICE_NAME, Health
from server.interceptors import CallInterceptor, ErrorInterceptor, UnreadableInterceptor
from server.pb.slipstream.v1 import admin_pb2_grpc, generation_pb2_grpc
from server.service import SERVICE_NAME
from server.tls import TlsFiles, server_credentials
from server.tracing import Tracing
from server.transport import Transport, listen, make_server

FLUSH_SECONDS = 0.5  # for the last statuses to leave; health watchers would hold the server longer


@dataclass(frozen=True)
class Services:
    """What is offered."""

    generation: generation_pb2_grpc.GenerationServiceServicer
    admin: admin_pb2_grpc.AdminServiceServicer
    health: Health
    gateway: GatewayProtocol | None
    tracing: Tracing


@dataclass(frozen=True)
class Ports:
    """As bound; 0: off."""

    generation: int
    gateway: int = 0
    health: int = 0
    admin: int = 0


class _Builder:
    """Makes the servers of one process, none of which has started."""

    def __init__(self, config: ServerConfig, services: Services, registry: CollectorRegistry) -> None:
        self._config = config
        self._services = services
        self._around = (CallInterceptor(registry), *services.tracing.interceptors(), ErrorInterceptor())
        self._callers = None if config.auth_tokens is None else Callers(config.auth_tokens)
        self.servers: list[grpc.aio.Server] = []

    def generation(self) -> int:
        server = self._make_server(self._tokens())
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._services.generation, server)
        names = [SERVICE_NAME]
        gateway = self._services.gateway
        if gateway is not None and not self._config.gateway_port:
            gateway.add_to(server)
            names.append(gateway.service_name)
        self._offer(server, *names)
        return listen(server, self._config.host, self._config.port, credentials=self._credentials())

    def gateway(self) -> int:
        """Plain, and open to whoever reaches it: for gateways that send no tokens. With tokens elsewhere, what comes
        here is a tenant of its own.
        """
        gateway = self._services.gateway
        assert gateway is not None, "checked with the configuration"
        trusts = None if self._callers is None else AuthInterceptor(lambda metadata: GATEWAY)
        server = self._make_server(trusts)
        gateway.add_to(server)
        self._offer(server, gateway.service_name)
        config = self._config
        return listen(server, config.gateway_host, config.gateway_port, setting="gateway_port")

    def health(self) -> int:
        """Plain, and open to everybody."""
        server = self._make_server(None)
        self._services.health.add_to(server)
        self.servers.append(server)
        return listen(server, self._config.host, self._config.health_port, setting="health_port")

    def admin(self) -> int:
        server = self._make_server(self._tokens(needs_admin=True))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._services.admin, server)
        self._offer(server, ADMIN_SERVICE_NAME)
        config = self._config
        return listen(
            server,
            config.admin_host,
            config.admin_port,
            credentials=self._credentials(),
            setting="admin_port",
        )

    def _tokens(self, *, needs_admin: bool = False) -> AuthInterceptor | None:
        if self._callers is None:
            return None
        return AuthInterceptor(self._callers.authenticate, needs_admin=needs_admin)

    def _credentials(self) -> grpc.ServerCredentials | None:
        """Of one listener: they say once what is new, so that a second listener would never hear of it."""
        config = self._config
        if config.tls_cert is None or config.tls_key is None:
            return None
        return server_credentials(TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca))

    def _make_server(self, auth: AuthInterceptor | None) -> grpc.aio.Server:
        asking = () if auth is None else (auth,)
        return make_server([*self._around, *asking, UnreadableInterceptor()], self._transport())

    def _offer(self, server: grpc.aio.Server, *service_names: str) -> None:
        self._services.health.add_to(server)
        names = (*service_names, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self.servers.append(server)

    def _transport(self) -> Transport:
        return Transport(
            max_message_bytes=self._config.max_message_bytes,
            keepalive_time=self._config.keepalive_time,
            keepalive_timeout=self._config.keepalive_timeout,
            max_connection_age=self._config.max_connection_age,
        )


@contextlib.asynccontextmanager
async def listening(
    config: ServerConfig,
    services: Services,
    registry: CollectorRegistry,
    on_bound: Callable[[Ports], None],
) -> AsyncIterator[None]:
    """Serve all ports of the configuration inside the block. Raises ConfigError for one that cannot be bound, and
    for files of certificates and tokens that cannot be used.
    """
    builder = _Builder(config, services, registry)
    on_bound(
        Ports(
            generation=builder.generation(),
            gateway=builder.gateway() if config.gateway_port else 0,
            health=builder.health() if config.health_port else 0,
            admin=builder.admin() if config.admin_port else 0,
        )
    )
    for server in builder.servers:
        await server.start()
    try:
        yield
    finally:
        await asyncio.gather(*(server.stop(FLUSH_SECONDS) for server in builder.servers))
