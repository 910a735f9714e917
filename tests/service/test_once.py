"""GenerateOnce: a stream collected into one answer."""

from __future__ import annotations

from typing import Any

import grpc

from engine.messages import FinishInfo, PositionLogprobs, TokenLogprob
from server.pb.slipstream.v1 import generation_pb2 as pb
from tests.support.fake_engine import EOS, FakeEngine
from tests.support.server_fixture import (
    collect,
    failure_of,
    run_into_deadline,
    running_server,
    text_request,
    texts,
)


async def test_it_equals_the_collected_stream() -> None:
    async with running_server() as server:
        request = text_request("the lazy dog 🙂", sampling=pb.SamplingParams(seed=1))
        messages = await collect(server.stub.Generate(request))
        answer = await server.stub.GenerateOnce(pb.GenerateOnceRequest(request=request))
    (choice,) = answer.choices
    assert answer.model == "tiny"
    assert answer.request_id.startswith("req-")
    assert choice.text == texts(messages) == "the lazy dog 🙂"
    assert list(choice.token_ids) == [i for message in messages for i in message.delta.token_ids]
    assert choice.finished.usage == messages[-1].finished.usage
    assert choice.finished.seed == 1


async def test_choices_are_in_order_whichever_ends_first() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.GenerateOnce(pb.GenerateOnceRequest(request=text_request(request_id="r", n=2)))
        await engine.wait_for_request("r#1")
        engine.emit("r#1", [40], finish=FinishInfo(reason="length"))
        engine.emit("r", [41], finish=FinishInfo(reason="stop", eos_token_id=EOS))
        answer = await call
    assert [(choice.index, list(choice.token_ids)) for choice in answer.choices] == [(0, [41]), (1, [40])]


async def test_prompt_logprobs_come_once() -> None:
    engine = FakeEngine()
    position = PositionLogprobs(token=TokenLogprob(5, -1.0, 1), top=[])
    async with running_server(engine) as server:
        request = text_request(request_id="r", n=2, output=pb.OutputParams(prompt_logprobs=0, logprobs=0))
        call = server.stub.GenerateOnce(pb.GenerateOnceRequest(request=request))
        await engine.wait_for_request("r#1")
        for engine_id in ("r", "r#1"):
            engine.emit(
                engine_id,
                [40],
                logprobs=[position],
                prompt_logprobs=[None, position],
                finish=FinishInfo(reason="length"),
            )
        answer = await call
    assert len(answer.prompt_logprobs) == 2
    assert [len(choice.logprobs) for choice in answer.choices] == [1, 1]


async def test_a_wrong_field_is_named_by_its_path_in_the_message() -> None:
    async with running_server() as server:
        request = text_request(sampling=pb.SamplingParams(top_p=2))
        failure = await failure_of(server.stub.GenerateOnce(pb.GenerateOnceRequest(request=request)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.field == "request.sampling.top_p"


async def test_a_deadline_ends_the_request_in_the_engine() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:

        def call(request_id: str, timeout: float) -> Any:
            request = pb.GenerateOnceRequest(request=text_request(request_id=request_id))
            return server.stub.GenerateOnce(request, timeout=timeout)

        request_id = await run_into_deadline(engine, call)
        await engine.wait_for(lambda: request_id in engine.aborted)
