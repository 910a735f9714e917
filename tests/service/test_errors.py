"""Every error: its status, its details, and a message that says what was got and what is expected."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from structlog.testing import capture_logs

from engine.errors import ConfigError, EngineError, InvalidRequestError, QueueFullError
from engine.messages import FinishInfo
from engine.stats import EngineStats
from server.errors import STATUSES, status_of
from server.interceptors import ErrorInterceptor
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.service import SERVICE_NAME
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import (
    RunningServer,
    collect,
    failure_of,
    running_server,
    text_request,
    with_template,
)

MAX_MODEL_LEN = 512
Fields = dict[str, Any]


def sampling(**fields: Any) -> Fields:
    return {"sampling": pb.SamplingParams(**fields)}


def stopping(**fields: Any) -> Fields:
    return {"stopping": pb.StoppingParams(**fields)}


def output(**fields: Any) -> Fields:
    return {"output": pb.OutputParams(**fields)}


def speculation(**fields: Any) -> Fields:
    return {"speculation": pb.SpeculationParams(**fields)}


BAD_FIELDS: list[tuple[Fields, str, str]] = [
    (sampling(temperature=-0.5), "sampling.temperature", "got -0.5, expected >= 0"),
    (sampling(temperature=math.nan), "sampling.temperature", "got nan"),
    (sampling(temperature=math.inf), "sampling.temperature", "got inf"),
    (sampling(top_p=0), "sampling.top_p", "got 0.0, expected > 0"),
    (sampling(top_p=1.5), "sampling.top_p", "got 1.5"),
    (sampling(min_p=-0.5), "sampling.min_p", "got -0.5"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty", "got 0.0, expected > 0"),
    (sampling(presence_penalty=2.5), "sampling.presence_penalty", "expected >= -2.0 and <= 2.0"),
    (sampling(frequency_penalty=-3), "sampling.frequency_penalty", "got -3.0"),
    (sampling(logit_bias={5: 101}), "sampling.logit_bias[5]", "got 101.0"),
    (sampling(logit_bias={320: 1}), "sampling.logit_bias", "got token id 320, expected 0 <= id < 320"),
    (sampling(allowed_token_ids=[320]), "sampling.allowed_token_ids", "got token id 320"),
    (sampling(bad_words=[""]), "sampling.bad_words", "got a word of 0 characters"),
    (sampling(bad_words=["x"] * 257), "sampling.bad_words", "got 257 entries, expected at most 256"),
    (sampling(bad_words=["x" * 257]), "sampling.bad_words", "got a word of 257 characters, expected 1..256"),
    (
        sampling(allowed_token_ids=[5] * 321),
        "sampling.allowed_token_ids",
        "got 321 ids, expected at most 320",
    ),
    (sampling(bad_words=["x" * 40]), "sampling.bad_words", "tokens in a word, expected at most 32"),
    (stopping(max_tokens=0), "stopping.max_tokens", "got 0, expected >= 1"),
    (stopping(max_tokens=2, min_tokens=3), "stopping.min_tokens", "got 3, expected >= 0 and <= 2"),
    (stopping(stop=["a"] * 17), "stopping.stop", "got 17 entries, expected at most 16"),
    (stopping(stop=[""]), "stopping.stop", "got an empty stop string"),
    (stopping(stop=["x" * 257]), "stopping.stop", "got 257 characters in a stop string"),
    (stopping(stop_token_ids=[320]), "stopping.stop_token_ids", "got token id 320"),
    (stopping(stop_token_ids=range(129)), "stopping.stop_token_ids", "got 129 entries"),
    (output(logprobs=21), "output.logprobs", "got 21, expected >= 0 and <= 20"),
    (output(prompt_logprobs=21), "output.prompt_logprobs", "got 21"),
    (output(stream_interval=0), "output.stream_interval", "got 0, expected >= 1"),
    (speculation(method="oracle"), "speculation.method", "got 'oracle', expected one of 'auto', 'none'"),
    (
        speculation(num_speculative_tokens=1),
        "speculation.num_speculative_tokens",
        "no draft method is loaded",
    ),
    (
        speculation(method="none", num_speculative_tokens=2),
        "speculation.num_speculative_tokens",
        "got 2, expected at most 0",
    ),
    ({"json_schema": ""}, "json_schema", "got an empty text"),
    ({"regex": ""}, "regex", "got an empty text"),
    ({"choice": pb.ChoiceConstraint()}, "choice", "got no choices, expected at least one"),
    (
        {"choice": pb.ChoiceConstraint(choices=["a"] * 1025)},
        "choice.choices",
        "got 1025 entries, expected at most 1024",
    ),
    ({"grammar": "x" * 65537}, "grammar", "got 65537 characters, expected at most 65536"),
    ({"n": 0}, "n", "got 0, expected 1..64"),
    ({"n": 65}, "n", "got 65, expected 1..64"),
    ({"request_id": ""}, "request_id", "expected 1..128 printable ASCII characters"),
    ({"request_id": "x" * 129}, "request_id", "expected 1..128"),
    ({"request_id": "naïve"}, "request_id", "got 'naïve'"),
    ({"request_id": "a\nb"}, "request_id", "got 'a\\nb'"),
    ({"cache_salt": "x" * 129}, "cache_salt", "got 129 characters, expected at most 128"),
]

BAD_PROMPTS: list[tuple[Fields, str, str]] = [
    ({}, "prompt", "is unset, expected text, token_ids or chat"),
    ({"text": ""}, "text", "got a prompt of 0 tokens"),
    ({"token_ids": pb.TokenIds()}, "token_ids", "got a prompt of 0 tokens, expected 1..511"),
    ({"token_ids": pb.TokenIds(ids=[5, 320])}, "token_ids.ids", "got token id 320, expected 0 <= id < 320"),
    (
        {"token_ids": pb.TokenIds(ids=[5] * MAX_MODEL_LEN)},
        "token_ids",
        "got a prompt of 512 tokens",
    ),
    ({"text": "x" * 5000}, "text", "tokens, expected 1..511"),
    ({"chat": pb.ChatPrompt()}, "chat.messages", "got none, expected at least one"),
]


async def stream_failure(server: RunningServer, **fields: Any) -> Any:
    return await failure_of(server.stub.Generate(pb.GenerateRequest(**fields)))


@pytest.mark.parametrize(("fields", "field", "message"), BAD_FIELDS, ids=lambda value: str(value)[:40])
async def test_a_wrong_field_is_named(fields: Fields, field: str, message: str) -> None:
    async with running_server() as server:
        failure = await stream_failure(server, text="the dog", **fields)
        assert not server.engine.requests
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.field == field
    assert message in failure.message
    assert failure.reason == "INVALID_REQUEST"
    assert failure.details["ErrorInfo"].domain == "slipstream"


@pytest.mark.parametrize(("fields", "field", "message"), BAD_PROMPTS, ids=lambda value: str(value)[:40])
async def test_a_wrong_prompt_is_named(fields: Fields, field: str, message: str) -> None:
    async with running_server() as server:
        failure = await stream_failure(server, **fields)
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (failure.field, message in failure.message) == (field, True), failure.message


async def test_a_prompt_that_leaves_one_token_is_served() -> None:
    async with running_server() as server:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * (MAX_MODEL_LEN - 1)))
        messages = await collect(server.stub.Generate(request))
    assert messages[-1].finished.usage.completion_tokens == 1
    assert messages[-1].finished.reason == pb.FINISH_REASON_LENGTH


async def test_an_unknown_model_is_not_found() -> None:
    async with running_server() as server:
        failure = await stream_failure(server, text="x", model="other")
    assert failure.code is grpc.StatusCode.NOT_FOUND
    assert failure.reason == "UNKNOWN_MODEL"
    assert "got model 'other', expected 'tiny'" in failure.message


async def test_a_message_that_quotes_the_request_is_short_enough_to_arrive() -> None:
    quoting = with_template("{{ raise_exception(messages[0].content) }}")
    async with running_server(tokenizer=quoting) as server:
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="🙂" * 100_000)])
        failure = await stream_failure(server, chat=chat)
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.message.endswith(" ...")
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="🙂" * 10_000, content="x")])
        failure = await stream_failure(server, chat=chat)
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.field == "chat.messages[0].role"


async def test_a_live_request_id_cannot_be_used_again() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r", n=2))
        await engine.wait_for_request("r#1")
        for taken in ("r", "r#1"):
            failure = await stream_failure(server, text="x", request_id=taken)
            assert failure.code is grpc.StatusCode.ALREADY_EXISTS
            assert (failure.field, failure.reason) == ("request_id", "REQUEST_ID_IN_USE")
        for engine_id in ("r", "r#1"):
            engine.emit(engine_id, [5], finish=FinishInfo(reason="length"))
        await collect(call)
        again = server.stub.Generate(text_request(request_id="r", n=2))
        await engine.wait_for(lambda: len(engine.live) == 2)
        again.cancel()


async def test_a_full_queue_says_when_to_try_again() -> None:
    engine = FakeEngine(max_waiting=2)
    async with running_server(engine) as server:
        engine.step(stats=EngineStats(num_waiting=2))
        failure = await stream_failure(server, text="x")
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert failure.reason == "QUEUE_FULL"
        retry_info = failure.details["RetryInfo"]
        assert isinstance(retry_info, error_details_pb2.RetryInfo)
        assert retry_info.retry_delay.seconds >= 1
        assert server.metric("slipstream_requests_rejected_total", model="tiny", reason="queue_full") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFullError("3 requests are waiting", 1.0), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (
            InvalidRequestError("prompt", "got token id 7, expected 0 <= id < 7"),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_what_the_engine_refuses_is_refused(error: EngineError, code: grpc.StatusCode) -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        engine.refuse("r", error)
        failure = await failure_of(call)
        assert (failure.code, failure.message) == (code, str(error))
        rejected = server.metric(
            "slipstream_requests_rejected_total", model="tiny", reason=error.reason.lower()
        )
        assert rejected == 1
        assert server.metric("slipstream_requests_total", model="tiny", finish_reason="error") is None


async def test_a_request_that_fails_in_the_engine_is_a_status_and_not_a_message() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r", n=2))
        await engine.wait_for_request("r#1")
        engine.emit("r#1", finish=FinishInfo(reason="error", message="the model's logits held NaN"))
        failure = await failure_of(call)
        assert failure.code is grpc.StatusCode.INTERNAL
        assert (failure.message, failure.reason) == ("the model's logits held NaN", "REQUEST_FAILED")
        await engine.wait_for(lambda: engine.aborted == ["r"])


async def test_internal_errors_are_told_to_the_log_and_not_to_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()

    def broken(request: Any) -> Any:
        raise ZeroDivisionError("a secret")

    async with running_server(engine) as server:
        monkeypatch.setattr(engine, "submit", broken)
        with capture_logs() as logs:
            failure = await stream_failure(server, text="x")
    assert (failure.code, failure.message) == (grpc.StatusCode.INTERNAL, "internal error")
    assert failure.reason == "INTERNAL"
    assert any(line["event"] == "handler failed" and line.get("exc_info") for line in logs)


async def test_a_message_over_the_limit_is_refused_and_the_limit_is_told() -> None:
    async with running_server(max_message_bytes="1KiB") as server:
        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.max_message_bytes == 1024
        failure = await stream_failure(server, text="x" * 2000)
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (pb.GenerateRequest(text="x"), "request"),
        (pb.SamplingParams(temperature=0), "sampling"),
        (pb.ChatMessage(role="user", content="x"), "chat.messages[0]"),
    ],
)
async def test_a_field_that_this_server_does_not_know_is_refused(message: Any, path: str) -> None:
    unknown = b"\xf8\x3f\x01"  # field 1023, varint 1
    message.MergeFromString(unknown)
    match message:
        case pb.SamplingParams():
            request = pb.GenerateRequest(text="x", sampling=message)
        case pb.ChatMessage():
            request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[message]))
        case _:
            request = message
    async with running_server() as server:
        failure = await failure_of(server.stub.Generate(request))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.field == path
        assert "field number 1023" in failure.message


@pytest.mark.parametrize(
    "rpc", ["Abort", "Tokenize", "Detokenize", "GetModelInfo", "GetServerInfo", "GetLoads", "GenerateOnce"]
)
async def test_every_rpc_refuses_unknown_fields(rpc: str) -> None:
    request = getattr(pb, f"{rpc}Request").FromString(b"\xf8\x3f\x01")
    async with running_server() as server:
        failure = await failure_of(getattr(server.stub, rpc)(request))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "field number 1023" in failure.message


@pytest.mark.parametrize("rpc", ["Generate", "GenerateOnce", "GetLoads"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(rpc: str) -> None:
    async with running_server() as server:
        make = server.channel.unary_stream if rpc == "Generate" else server.channel.unary_unary
        call = make(f"/{SERVICE_NAME}/{rpc}", request_serializer=bytes, response_deserializer=bytes)
        with capture_logs() as logs:
            failure = await failure_of(call(b"\xff"))
            assert await server.handled(rpc, "INVALID_ARGUMENT") == 1
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request")
        assert not [entry for entry in logs if entry["log_level"] == "error"]


async def test_while_the_engine_loads_generations_are_unavailable() -> None:
    engine = FakeEngine()
    engine.may_start.clear()
    async with running_server(engine, wait_until_ready=False) as server:
        for call in (
            server.stub.Generate(text_request()),
            server.stub.GenerateOnce(pb.GenerateOnceRequest(request=text_request())),
            server.stub.GetModelInfo(pb.GetModelInfoRequest()),
        ):
            failure = await failure_of(call)
            assert failure.code is grpc.StatusCode.UNAVAILABLE
            assert failure.message == "the engine is loading"
            assert "RetryInfo" in failure.details


def test_every_error_has_a_status_of_its_own_or_of_a_base() -> None:
    code, status = status_of(ConfigError("x"))
    assert (code, status.code) == (grpc.StatusCode.INTERNAL, 13)
    assert all(issubclass(known, EngineError) for known in STATUSES)


async def test_a_client_that_leaves_while_a_message_goes_out_is_no_failure_of_the_server() -> None:
    async def handler(request: object, context: object) -> None:
        raise grpc.aio.InternalError("a message could not be sent")

    guarded = ErrorInterceptor._around("/slipstream.v1.GenerationService/Generate", handler)
    with capture_logs() as logs, pytest.raises(grpc.aio.InternalError):  # grpcio ends the call quietly
        await guarded(None, None)
    assert not logs
