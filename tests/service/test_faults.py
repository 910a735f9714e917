"""However a call ends, its request ends in the engine: cancel, deadline, disconnect, abort, slow reader."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

from engine.messages import FinishInfo
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from server.text import TextProcessor
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import (
    collect,
    failure_of,
    run_into_deadline,
    running_server,
    text_request,
)

LONG = list(range(300)) * 1000  # ids of one message: more than the 64 KiB that HTTP/2 takes unread
FIXED_WINDOW = [("grpc.http2.bdp_probe", 0)]


async def test_a_cancelled_stream_frees_every_choice() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r", n=3))
        await engine.wait_for_request("r#2")
        engine.emit("r", [5])
        await call.read()
        call.cancel()
        await engine.wait_for(lambda: len(engine.aborted) == 3)
        assert sorted(engine.aborted) == ["r", "r#1", "r#2"]
        assert not engine.live


async def test_a_deadline_frees_the_request() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        request_id = await run_into_deadline(
            engine, lambda name, timeout: server.stub.Generate(text_request(request_id=name), timeout=timeout)
        )
        await engine.wait_for(lambda: request_id in engine.aborted)


async def test_a_client_that_goes_away_frees_its_request() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        address = f"127.0.0.1:{server.app.port}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = pb_grpc.GenerationServiceStub(channel).Generate(text_request(request_id="r"))
            await engine.wait_for_request("r")
            engine.emit("r", [5])
            await call.read()
        await engine.wait_for(lambda: engine.aborted == ["r"])


async def test_abort_ends_all_choices_as_cancelled() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r", n=2))
        await engine.wait_for_request("r#1")
        engine.emit("r", [5])
        answer = await server.stub.Abort(pb.AbortRequest(request_ids=["r", "unknown", "r"]))
        assert list(answer.aborted_request_ids) == ["r"]
        messages = await collect(call)
        reasons = [message.finished.reason for message in messages if message.HasField("finished")]
        assert reasons == [pb.FINISH_REASON_CANCELLED] * 2
        again = await server.stub.Abort(pb.AbortRequest(request_ids=["r"]))
        assert not again.aborted_request_ids


async def test_abort_of_no_or_too_many_ids_is_refused() -> None:
    async with running_server() as server:
        for count, got in ((0, "none"), (1025, "1025 entries")):
            failure = await failure_of(server.stub.Abort(pb.AbortRequest(request_ids=["x"] * count)))
            assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
            assert (failure.field, f"got {got}" in failure.message) == ("request_ids", True)


async def test_a_request_that_is_aborted_while_its_prompt_is_tokenized_ends_as_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()
    is_tokenizing, is_aborted = asyncio.Event(), asyncio.Event()
    encode = TextProcessor.encode

    async def encode_after_the_abort(self: TextProcessor, text: str, **options: bool) -> list[int]:
        is_tokenizing.set()
        await is_aborted.wait()
        return await encode(self, text, **options)

    monkeypatch.setattr(TextProcessor, "encode", encode_after_the_abort)
    async with running_server(engine) as server:
        reading = asyncio.create_task(collect(server.stub.Generate(text_request(request_id="r"))))
        await is_tokenizing.wait()
        answer = await server.stub.Abort(pb.AbortRequest(request_ids=["r"]))
        assert list(answer.aborted_request_ids) == ["r"]
        is_aborted.set()
        assert (await reading)[-1].finished.reason == pb.FINISH_REASON_CANCELLED
        assert not engine.live


async def test_an_abort_when_the_engine_has_ended_the_request_aborts_nothing() -> None:
    engine = FakeEngine()
    async with running_server(engine, channel_options=FIXED_WINDOW) as server:
        request = text_request(request_id="r", output=pb.OutputParams(text=False, prompt_logprobs=0))
        call = server.stub.Generate(request)
        await engine.wait_for_request("r")
        length = FinishInfo(reason="length")
        engine.emit(
            "r", prompt_logprobs=[None] * 100_000, finish=length
        )  # more than the transport takes unread
        answer = await server.stub.Abort(pb.AbortRequest(request_ids=["r"]))
        assert not answer.aborted_request_ids
        assert len(server.app.live) == 1
        assert (await collect(call))[-1].finished.reason == pb.FINISH_REASON_LENGTH


async def test_when_a_choice_is_refused_those_before_it_are_freed() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r", n=3))
        await engine.wait_for_request("r#2")
        engine.live.discard("r#2")  # the engine has yet to say that it ended
        call.cancel()
        await engine.wait_for(lambda: len(engine.aborted) == 3)
        await server.app.live.wait_until_empty()
        engine.aborted.clear()
        failure = await failure_of(server.stub.Generate(text_request(request_id="r", n=3)))
        assert failure.code is grpc.StatusCode.ALREADY_EXISTS
        assert (engine.aborted, engine.live) == (["r", "r#1"], set())


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_client_that_does_not_read_is_cut_off(is_first: bool) -> None:
    engine = FakeEngine()
    async with running_server(engine, channel_options=FIXED_WINDOW) as server:
        request = text_request(request_id="r", output=pb.OutputParams(text=False, prompt_logprobs=0))
        call = server.stub.Generate(request)
        await engine.wait_for_request("r")
        if is_first:  # the message that is stuck
            engine.emit("r", prompt_logprobs=[None] * 100_000)
        else:
            engine.emit("r", prompt_logprobs=[None])
            await call.read()
            engine.emit("r", LONG)
        while engine.live:
            await server.is_serving()  # lets the server work
            server.app.live.end_slow_readers(time.monotonic() + 61.0, timeout=60.0)
        assert engine.aborted == ["r"]
        failure = await failure_of(call)
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (failure.reason, "for 60 s" in failure.message) == ("SLOW_READER", True)
        assert server.metric("slipstream_slow_readers_total", model="tiny") == 1


async def test_a_reader_that_is_waited_for_is_not_slow() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        engine.emit("r", [5])
        await call.read()
        await call.read()
        server.app.live.end_slow_readers(time.monotonic() + 1000.0, timeout=60.0)
        engine.emit("r", [6], finish=FinishInfo(reason="length"))
        assert (await collect(call))[-1].HasField("finished")


async def test_when_the_engine_dies_streams_are_unavailable_and_the_server_ends() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        watch = server.health.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await watch.read()).status == 1
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        engine.emit("r", [5])
        engine.die("cuda said something internal")
        failure = await failure_of(call)
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        assert "internal" not in failure.message
        retry_info = failure.details["RetryInfo"]
        assert isinstance(retry_info, error_details_pb2.RetryInfo)
        assert (await watch.read()).status == 2
        assert await server.ended == 1
