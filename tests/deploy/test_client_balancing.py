"""The service config for clients that balance by themselves: servers take turns, one that drains gets nothing."""

from __future__ import annotations

import json
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from server.health import READINESS_NAMES
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from server.service import SERVICE_NAME
from tests.support.monitoring import DEPLOY
from tests.support.server_fixture import RunningServer, collect, running_server, text_request

SERVICE_CONFIG = (DEPLOY / "clients" / "service-config.json").read_text(encoding="utf-8")


def num_calls(server: RunningServer) -> int:
    labels = {"grpc_service": SERVICE_NAME, "grpc_method": "Generate"}
    return int(server.metric("grpc_server_started_total", **labels) or 0)


def channel_to(*servers: RunningServer) -> grpc.aio.Channel:
    """As to a name that DNS resolves to several addresses."""
    addresses = ",".join(f"127.0.0.1:{server.app.port}" for server in servers)
    options = [("grpc.service_config", SERVICE_CONFIG), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(f"ipv4:{addresses}", options=options)


async def generate(stub: Any) -> None:
    await collect(stub.Generate(text_request(), wait_for_ready=True))


async def calls_of_two_requests(server: RunningServer, stub: Any) -> int:
    """How many of the next two come to this server; with two servers in turn it would be one."""
    before = num_calls(server)
    await generate(stub)
    await generate(stub)
    return num_calls(server) - before


def test_it_names_our_service_and_its_health() -> None:
    config = json.loads(SERVICE_CONFIG)
    assert config["healthCheckConfig"]["serviceName"] in READINESS_NAMES
    assert config["methodConfig"][0]["name"] == [{"service": SERVICE_NAME}]


async def test_requests_of_one_channel_take_turns_and_leave_a_server_that_drains() -> None:
    async with (
        running_server(drain_delay=60) as first,
        running_server() as second,
        channel_to(first, second) as channel,
    ):
        stub = pb_grpc.GenerationServiceStub(channel)
        while not (num_calls(first) and num_calls(second)):  # both are connected and found healthy
            await generate(stub)
        before = num_calls(first), num_calls(second)
        for _ in range(8):
            await generate(stub)
        assert (num_calls(first) - before[0], num_calls(second) - before[1]) == (4, 4)

        first.app.stop()
        await first.wait_for_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        while await calls_of_two_requests(first, stub):  # until the client has heard of it too
            pass
        assert [await calls_of_two_requests(first, stub) for _ in range(4)] == [0, 0, 0, 0]
