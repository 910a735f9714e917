"""grpc.health.v1 for balancers, clients and Kubernetes probes.

`readiness`, the server as a whole ("") and our service say whether new requests are welcome; `liveness` says
whether a restart would help. The statuses are told from outside: nothing here decides them.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from server.service import SERVICE_NAME

READINESS_NAMES = ("", "readiness", SERVICE_NAME)
LIVENESS_NAME = "liveness"
HEALTH_SERVICE_NAME: str = health.SERVICE_NAME


class Health:
    """Check and Watch on a grpc.aio server."""

    def __init__(self, more_services: Iterable[str] = ()) -> None:
        """`more_services` are as ready as ours."""
        self._readiness_names = (*READINESS_NAMES, *more_services)
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_ready(self, is_ready: bool) -> None:
        for name in self._readiness_names:
            await self._servicer.set(name, _status(is_ready))

    async def set_alive(self, is_alive: bool) -> None:
        await self._servicer.set(LIVENESS_NAME, _status(is_alive))


def _status(is_good: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if is_good else health_pb2.HealthCheckResponse.NOT_SERVING
