"""An engine that dies is started again: streams end, readiness follows, and at some point it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2

from engine.errors import CheckpointError
from engine.messages import FinishInfo
from engine.stats import EngineStats
from server import restarts as restarts_module
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.restarts import MAX_DELAY, STABLE_AFTER, Restarts
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import collect, failure_of, running_server, text_request

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts_module, "FIRST_DELAY", 0.0)


class Engines:
    """The engines that follow the first."""

    def __init__(self, prepare: Callable[[FakeEngine], None] = lambda engine: None) -> None:
        self.made: list[FakeEngine] = []
        self._prepare = prepare

    def __call__(self) -> FakeEngine:
        engine = FakeEngine()
        self._prepare(engine)
        self.made.append(engine)
        return engine


@pytest.mark.usefixtures("no_delay")
async def test_streams_end_readiness_follows_and_the_next_engine_serves() -> None:
    first = FakeEngine()
    engines = Engines(lambda engine: engine.may_start.clear())
    async with running_server(first, restart_engine=engines) as server:
        watch = server.health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == SERVING
        call = server.stub.Generate(text_request(request_id="r"))
        await first.wait_for_request("r")
        first.emit("r", [5])
        first.die("cuda said something internal")
        failure = await failure_of(call)
        assert (failure.code, "RetryInfo" in failure.details) == (grpc.StatusCode.UNAVAILABLE, True)
        assert "internal" not in failure.message
        assert (await watch.read()).status == NOT_SERVING
        assert await server.is_serving("liveness")
        failure = await failure_of(server.stub.Generate(text_request()))
        assert (failure.code, failure.message) == (
            grpc.StatusCode.UNAVAILABLE,
            "the engine is being restarted",
        )
        assert server.metric("slipstream_engine_up", model="tiny") == 0
        while not engines.made:
            await asyncio.sleep(0)
        (second,) = engines.made
        second.may_start.set()
        assert (await watch.read()).status == SERVING
        assert first.is_stopped
        call = server.stub.Generate(text_request(request_id="r"))  # the id of the lost request
        await second.wait_for_request("r")
        second.emit("r", [5], finish=FinishInfo(reason="length"))
        assert (await collect(call))[-1].HasField("finished")
        assert server.metric("slipstream_engine_up", model="tiny") == 1
        assert not (await server.stub.GetLoads(pb.GetLoadsRequest())).draining
    assert second.is_stopped


@pytest.mark.usefixtures("no_delay")
async def test_an_engine_that_does_not_come_back_ends_the_server() -> None:
    def never_starts(engine: FakeEngine) -> None:
        engine.start_error = CheckpointError("models/tiny: gone")

    first, engines = FakeEngine(), Engines(never_starts)
    async with running_server(first, restart_engine=engines, engine_restarts=2) as server:
        watch = server.health.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await watch.read()).status == SERVING
        first.die("out of memory")
        assert (await watch.read()).status == NOT_SERVING
        assert await server.ended == 1
    assert len(engines.made) == 2
    assert all(engine.is_stopped for engine in engines.made)


async def test_a_stop_while_the_engine_is_being_restarted_is_a_stop() -> None:
    first, engines = FakeEngine(), Engines()
    async with running_server(first, restart_engine=engines) as server:
        first.die("out of memory")
        await server.wait_for_health(NOT_SERVING)
        server.app.stop()
        assert await server.ended == 0
    assert not engines.made


@pytest.mark.usefixtures("no_delay")
async def test_a_stop_while_the_next_engine_loads_is_a_stop() -> None:
    first, engines = FakeEngine(), Engines(lambda engine: engine.may_start.clear())
    async with running_server(first, restart_engine=engines) as server:
        first.die("out of memory")
        while not engines.made:
            await server.is_serving()
        server.app.stop()
        assert await server.ended == 0
    assert engines.made[0].is_stopped


async def test_an_engine_that_is_gone_has_no_load() -> None:
    first, engines = FakeEngine(), Engines(lambda engine: engine.may_start.clear())
    async with running_server(first, restart_engine=engines) as server:
        stats = EngineStats(
            num_running=3, num_waiting=4, num_waiting_tokens=5, num_blocks=100, num_free_blocks=9
        )
        first.step(stats=stats)
        assert server.metric("slipstream_requests_waiting", model="tiny") == 4
        first.die("out of memory")
        first.step(stats=stats)  # what was on its way
        await server.wait_for_health(NOT_SERVING)
        for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
            assert server.metric(f"slipstream_{name}", model="tiny") == 0, name
        for state in ("free", "used", "cached"):
            assert server.metric("slipstream_kv_blocks", model="tiny", state=state) == 0, state
        assert await server.stub.GetLoads(pb.GetLoadsRequest()) == pb.GetLoadsResponse(draining=True)


def test_pauses_grow_and_a_long_service_forgives() -> None:
    now = 0.0
    restarts = Restarts(8, clock=lambda: now)
    delays = [restarts.next_delay() for _ in range(9)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_DELAY, MAX_DELAY, MAX_DELAY, None]
    restarts.engine_serves()
    now += STABLE_AFTER - 1
    assert restarts.next_delay() is None
    restarts.engine_serves()
    now += STABLE_AFTER
    assert restarts.next_delay() == 1.0
