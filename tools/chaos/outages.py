"""Kills the engine of a server again and again, and notes when there was none."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tools.server_process import ServerProcess
from tools.server_state import OWN_CONNECTION

_POLL_SECONDS = 0.1
_READY = health_pb2.HealthCheckRequest(service="readiness")
_SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class Outage:
    """From the kill of an engine to the next one that serves; times of time.monotonic()."""

    began: float
    ended: float = float("inf")


async def kill_again_and_again(server: ServerProcess, every: float, outages: list[Outage]) -> None:
    """Until cancelled: a kill after `every` seconds of service. Appends to `outages`."""
    while True:
        await asyncio.sleep(every)
        outage = Outage(time.monotonic())
        outages.append(outage)
        server.kill_engine()
        await wait_for_readiness(server.address, False)
        await wait_for_readiness(server.address, True)
        outage.ended = time.monotonic()


async def wait_for_readiness(address: str, is_ready: bool) -> None:
    """Until the server says so."""
    async with grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while ((await health.Check(_READY)).status == _SERVING) != is_ready:
            await asyncio.sleep(_POLL_SECONDS)
