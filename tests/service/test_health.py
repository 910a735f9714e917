"""grpc.health.v1 and server reflection, as balancers, probes and command-line clients use them."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import failure_of, running_server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "slipstream.v1.GenerationService"


async def test_watch_follows_a_server_from_loading_to_draining() -> None:
    engine = FakeEngine()
    engine.may_start.clear()
    async with running_server(engine, wait_until_ready=False, grace=0) as server:
        watch = server.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == NOT_SERVING
        engine.may_start.set()
        assert (await watch.read()).status == SERVING
        server.app.stop()
        assert (await watch.read()).status == NOT_SERVING


async def test_every_name_has_a_status() -> None:
    engine = FakeEngine()
    engine.may_start.clear()
    async with running_server(engine, wait_until_ready=False) as server:
        names = ("", SERVICE, "readiness", "liveness")
        assert [await server.is_serving(name) for name in names] == [False, False, False, True]
        engine.may_start.set()
        await server.wait_for_health(SERVING)
        assert [await server.is_serving(name) for name in names] == [True, True, True, True]


async def test_an_unknown_service_is_not_found() -> None:
    async with running_server() as server:
        failure = await failure_of(server.health.Check(health_pb2.HealthCheckRequest(service="other")))
    assert failure.code is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_and_describes_the_services() -> None:
    async with running_server() as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert described.file_descriptor_response.file_descriptor_proto
