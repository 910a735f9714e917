"""Connections that end without anybody saying so, and connections that are told to end."""

from __future__ import annotations

import grpc
import pytest

from engine.messages import FinishInfo
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from server.transport import Transport
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import collect, running_server, text_request
from tests.support.tcp_proxy import tcp_proxy

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


async def test_a_client_that_vanishes_silently_is_found_and_its_request_freed() -> None:
    engine = FakeEngine()
    async with (
        running_server(engine, keepalive_time=0.2, keepalive_timeout=2.0) as server,
        tcp_proxy(server.app.port) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}", options=OWN_CONNECTION) as channel,
    ):
        call = pb_grpc.GenerationServiceStub(channel).Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        engine.emit("r", [5])
        await call.read()
        proxy.is_open = False
        await engine.wait_for(lambda: engine.aborted == ["r"])
        call.cancel()


async def test_an_old_connection_is_replaced_while_its_streams_go_on() -> None:
    engine = FakeEngine()
    async with (
        running_server(engine, max_connection_age=0.2) as server,
        tcp_proxy(server.app.port) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}", options=OWN_CONNECTION) as channel,
    ):
        stub = pb_grpc.GenerationServiceStub(channel)
        call = stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        engine.emit("r", [5])
        await call.read()
        while proxy.num_connections < 3:
            await stub.GetLoads(pb.GetLoadsRequest(), wait_for_ready=True)
        engine.emit("r", [6], finish=FinishInfo(reason="length"))
        assert (await collect(call))[-1].HasField("finished")


@pytest.mark.parametrize(("age", "expected"), [(0.0, None), (1.5, 1500)])
def test_seconds_become_milliseconds_and_no_age_is_no_option(age: float, expected: int | None) -> None:
    options = dict(Transport(max_message_bytes=1, max_connection_age=age).options())
    assert options.get("grpc.max_connection_age_ms") == expected
    assert options["grpc.keepalive_time_ms"] == 60_000
