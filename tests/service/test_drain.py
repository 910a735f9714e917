"""The end of a server: drain delay, refusal, grace, a second signal. Signals are real, to this process."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2

from engine.errors import CheckpointError, ConfigError, EngineUnavailableError
from engine.messages import FinishInfo
from server.app import App, ModelFiles
from server.pb.slipstream.v1 import generation_pb2 as pb
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import (
    collect,
    failure_of,
    running_server,
    server_config,
    text_request,
    tiny_tokenizer,
)

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_running_streams_finish_while_new_ones_are_refused() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        terminate()
        await server.wait_for_health(NOT_SERVING)
        assert await server.is_serving("liveness")
        failure = await failure_of(server.stub.Generate(text_request()))
        assert (failure.code, failure.message) == (grpc.StatusCode.UNAVAILABLE, "the server is draining")
        assert "RetryInfo" in failure.details
        loads = await server.stub.GetLoads(pb.GetLoadsRequest())
        assert loads.draining
        engine.emit("r", [5], finish=FinishInfo(reason="length"))
        assert (await collect(call))[-1].HasField("finished")
        assert await server.ended == 0
    assert engine.is_stopped


async def test_new_requests_are_accepted_during_the_drain_delay() -> None:
    engine = FakeEngine(echo=True)
    async with running_server(engine, drain_delay=30) as server:
        terminate()
        await server.wait_for_health(NOT_SERVING)
        assert (await collect(server.stub.Generate(text_request())))[-1].HasField("finished")
        assert not server.ended.done()
        terminate()
        assert await server.ended == 0


async def test_what_runs_at_the_end_of_the_grace_time_is_cut() -> None:
    engine = FakeEngine()
    async with running_server(engine, grace=0) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        terminate()
        failure = await failure_of(call)
        assert (failure.code, failure.message) == (grpc.StatusCode.UNAVAILABLE, "the server stopped")
        assert await server.ended == 0
    assert engine.aborted == ["r"]


async def test_a_second_signal_stops_at_once() -> None:
    engine = FakeEngine()
    async with running_server(engine, drain_delay=600, grace=600) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        terminate()
        await server.wait_for_health(NOT_SERVING)
        terminate()
        assert (await failure_of(call)).code is grpc.StatusCode.UNAVAILABLE
        assert await server.ended == 0


async def test_a_client_that_does_not_read_does_not_keep_the_server() -> None:
    engine = FakeEngine()
    fixed_window = [("grpc.http2.bdp_probe", 0)]
    async with running_server(engine, grace=0, channel_options=fixed_window) as server:
        request = text_request(request_id="r", output=pb.OutputParams(text=False))
        call = server.stub.Generate(request)
        await engine.wait_for_request("r")
        engine.emit("r", [5])
        await call.read()
        engine.emit("r", [5] * 100_000)
        terminate()
        assert await server.ended == 0
    assert not engine.live


async def test_a_signal_while_the_engine_loads_stops_the_server() -> None:
    engine = FakeEngine()
    engine.may_start.clear()
    async with running_server(engine, wait_until_ready=False) as server:
        assert await server.is_serving("liveness")
        assert not await server.is_serving()
        terminate()
        assert await server.ended == 0
    assert engine.is_stopped


async def test_a_start_that_is_cancelled_at_once_leaves_nothing_behind() -> None:
    engine = FakeEngine()
    engine.may_start.clear()
    app = App(server_config(), engine, lambda model: ModelFiles(tiny_tokenizer(), {}))
    before = asyncio.all_tasks()
    running = asyncio.create_task(app.run())
    await asyncio.sleep(0)  # it has begun to start the engine
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert engine.is_stopped
    assert asyncio.all_tasks() == before


async def test_an_engine_that_dies_while_draining_is_an_error() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        terminate()
        await server.wait_for_health(NOT_SERVING)
        engine.die("out of memory")
        assert (await failure_of(call)).code is grpc.StatusCode.UNAVAILABLE
        assert await server.ended == 1


async def test_an_engine_that_cannot_start_ends_the_server_with_its_reason() -> None:
    engine = FakeEngine()
    engine.start_error = CheckpointError("models/tiny: no such file")
    with pytest.raises(CheckpointError, match="no such file"):
        async with running_server(engine, wait_until_ready=False) as server:
            await asyncio.shield(server.ended)
    assert engine.is_stopped


async def test_an_engine_that_the_same_signal_ended_while_it_loaded_is_no_failure() -> None:
    engine = FakeEngine()
    engine.start_error = EngineUnavailableError("the engine process was killed by SIGTERM")
    app = App(server_config(), engine, lambda model: ModelFiles(tiny_tokenizer(), {}))
    app.stop()
    assert await app.run() == 0


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async with running_server() as server:
        engine = FakeEngine()
        with pytest.raises(
            ConfigError, match=f"port: cannot listen on 127.0.0.1:{server.app.port}: it is in use"
        ):
            async with running_server(engine, port=server.app.port):
                pass
        assert engine.is_stopped
