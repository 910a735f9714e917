"""The vLLM engine protocol: what gateways get from this server, and what of theirs reaches the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

from engine.errors import ConfigError
from engine.messages import FinishInfo, PositionLogprobs, TokenLogprob
from engine.params import Constraint
from engine.stats import SpecObservation
from server.config import load_config
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tests.support.fake_engine import EOS, FakeEngine
from tests.support.gateway import PROMPT, gateway_server, make_frontend_checkpoint, request_of, stub_of
from tests.support.server_fixture import collect, failure_of
from tools.server_process import free_port

LENGTH = FinishInfo(reason="length")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_frontend_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def gateway(checkpoint: Path) -> Callable[..., Any]:
    return partial(gateway_server, checkpoint)


def position(token_id: int, logprob: float) -> PositionLogprobs:
    """A token that is the second most likely one."""
    token = TokenLogprob(token_id=token_id, logprob=logprob, rank=2)
    return PositionLogprobs(token=token, top=[TokenLogprob(token_id=9, logprob=-0.25, rank=1), token])


# ---- answers -----------------------------------------------------------------------------------------------


async def test_a_stream_brings_chunks_and_then_how_it_ended(gateway: Any) -> None:
    async with gateway() as server:
        messages = await collect(stub_of(server).Generate(request_of(stream=True)))
    *chunks, last = messages
    assert [message.WhichOneof("response") for message in chunks] == ["chunk"] * len(chunks)
    assert [i for message in chunks for i in message.chunk.token_ids] == [*PROMPT, EOS]
    assert all(message.chunk.completion_tokens == len(message.chunk.token_ids) for message in chunks)
    assert {message.chunk.prompt_tokens for message in chunks} == {len(PROMPT)}
    complete = last.complete
    assert (complete.finish_reason, list(complete.output_ids)) == ("stop", [])
    assert (complete.prompt_tokens, complete.completion_tokens) == (3, 4)
    assert complete.WhichOneof("matched_stop") is None


async def test_without_streaming_each_choice_is_one_message(gateway: Any) -> None:
    async with gateway() as server:
        messages = await collect(stub_of(server).Generate(request_of({"n": 3, "max_tokens": 2})))
    completes = sorted((message.complete for message in messages), key=lambda complete: complete.index)
    assert [complete.index for complete in completes] == [0, 1, 2]
    for complete in completes:
        assert (list(complete.output_ids), complete.finish_reason) == (PROMPT[:2], "length")
        assert complete.completion_tokens == 2


async def test_the_choices_of_a_stream_are_told_apart(gateway: Any) -> None:
    async with gateway() as server:
        messages = await collect(stub_of(server).Generate(request_of({"n": 2}, stream=True)))
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    for index in (0, 1):
        ids = [i for chunk in chunks if chunk.index == index for i in chunk.token_ids]
        assert ids == [*PROMPT, EOS]
    assert sorted(message.complete.index for message in messages if message.HasField("complete")) == [0, 1]


async def test_a_text_is_tokenized_here(gateway: Any) -> None:
    async with gateway() as server:
        await collect(stub_of(server).Generate(vllm.GenerateRequest(request_id="r", text="the dog")))
        assert len(server.engine.requests["r"].prompt_token_ids) == 2


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_logprobs_of_output_and_prompt_come_once(gateway: Any, is_streamed: bool) -> None:
    engine = FakeEngine()
    async with gateway(engine) as server:
        request = request_of({"logprobs": 2, "prompt_logprobs": 2}, stream=is_streamed)
        call = stub_of(server).Generate(request)
        await engine.wait_for_request("r")
        engine.emit("r", prompt_logprobs=[None, position(41, -1.5), position(42, -2.5)])
        engine.emit("r", [7], logprobs=[position(7, -0.5)])
        engine.emit("r", [8], logprobs=[position(8, -0.75)], finish=LENGTH)
        messages = await collect(call)
    parts = [message.chunk if message.HasField("chunk") else message.complete for message in messages]
    prompts = [part.input_logprobs for part in parts if part.HasField("input_logprobs")]
    outputs = [part.output_logprobs for part in parts if part.HasField("output_logprobs")]
    assert [i for output in outputs for i in output.token_ids] == [7, 8]
    assert [value for output in outputs for value in output.token_logprobs] == [-0.5, -0.75]
    assert outputs[0].top_logprobs[0] == vllm.TopLogProbs(values=[-0.25, -0.5], token_ids=[9, 7])
    (prompt,) = prompts
    assert list(prompt.token_ids) == PROMPT
    first, second, _ = prompt.token_logprobs
    assert (first.HasField("value"), second.value) == (False, -1.5)
    assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [9, 41], [9, 42]]


async def test_the_answer_says_what_drafts_brought_and_what_the_prefix_cache_had(gateway: Any) -> None:
    engine = FakeEngine()
    async with gateway(engine) as server:
        call = stub_of(server).Generate(request_of())
        await engine.wait_for_request("r")
        spec = SpecObservation(
            method="ngram", num_drafted=4, num_verifier_accepted=2, num_accepted=2, num_emitted=3
        )
        engine.emit("r", [7, 8, 9], spec=[spec], num_cached_tokens=2)
        engine.emit("r", [7, 8, 9], spec=[spec], num_cached_tokens=2, finish=LENGTH)
        (message,) = await collect(call)
    assert (message.complete.spec_accepted_tokens, message.complete.spec_draft_tokens) == (4, 8)
    assert (message.complete.cached_tokens, message.complete.completion_tokens) == (2, 6)


@pytest.mark.parametrize(
    ("finish", "reason", "cause"),
    [
        (FinishInfo(reason="stop", eos_token_id=EOS), "stop", None),
        (FinishInfo(reason="stop", stop_token_id=9), "stop", 9),
        (FinishInfo(reason="stop", stop_string="dog"), "stop", "dog"),
        (FinishInfo(reason="stop", is_constraint_met=True), "stop", None),
        (FinishInfo(reason="length"), "length", None),
        (FinishInfo(reason="cancelled"), "abort", None),
    ],
)
async def test_every_end_has_its_name(gateway: Any, finish: FinishInfo, reason: str, cause: Any) -> None:
    engine = FakeEngine()
    async with gateway(engine) as server:
        call = stub_of(server).Generate(request_of())
        await engine.wait_for_request("r")
        engine.emit("r", [9], finish=finish)
        (message,) = await collect(call)
    complete = message.complete
    matched = complete.WhichOneof("matched_stop")
    assert complete.finish_reason == reason
    assert (None if matched is None else getattr(complete, matched)) == cause


# ---- requests ----------------------------------------------------------------------------------------------


async def test_every_parameter_reaches_the_engine(gateway: Any) -> None:
    params = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 5,
        "min_tokens": 2,
        "stop": ["x"],
        "stop_token_ids": [9],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "ignore_eos": True,
        "logprobs": 1,
        "seed": -3,
        "include_stop_str_in_output": True,
        "logit_bias": {5: -1.5},
        "grammar_from_first_token": True,
    }
    async with gateway() as server:
        await collect(stub_of(server).Generate(request_of(params)))
        got = server.engine.requests["r"].params
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.5, 0.75, 7, 0.25)
    assert (got.frequency_penalty, got.presence_penalty, got.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (got.max_tokens, got.min_tokens, got.stop_strings, got.stop_token_ids) == (5, 2, ("x",), (9,))
    assert (got.skip_special_tokens, got.ignore_eos, got.include_stop) == (True, True, True)
    assert (got.logprobs, got.seed, got.logit_bias) == (1, -3, {5: -1.5})


async def test_nothing_set_is_plain_sampling_whatever_the_checkpoint_says(gateway: Any) -> None:
    """The gateway applies the checkpoint's defaults, so an unset field was switched off."""
    async with gateway(generation_config={"temperature": 0.6, "top_k": 20}) as server:
        await collect(stub_of(server).Generate(request_of()))
        got = server.engine.requests["r"].params
    assert (got.temperature, got.top_p, got.top_k, got.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert (got.logprobs, got.prompt_logprobs, got.min_tokens) == (None, None, 0)


@pytest.mark.parametrize(
    ("params", "constraint"),
    [
        ({"json_schema": "{}"}, Constraint(kind="json_schema", text="{}")),
        ({"regex": "a+"}, Constraint(kind="regex", text="a+")),
        ({"grammar": 'start: "a"'}, Constraint(kind="grammar", text='start: "a"')),
        ({"choice": {"choices": ["a", "b"]}}, Constraint(kind="choice", choices=("a", "b"))),
        ({"json_object": True}, Constraint(kind="json_object")),
        ({"json_object": False}, None),
    ],
)
async def test_constraints_reach_the_engine(gateway: Any, params: Any, constraint: Constraint | None) -> None:
    async with gateway() as server:
        await collect(stub_of(server).Generate(request_of(params)))
        assert server.engine.requests["r"].constraint == constraint


def unknown_field() -> vllm.GenerateRequest:
    request = request_of()
    request.MergeFromString(b"\xf8\x3f\x01")  # field 1023, a varint
    return request


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (request_of(kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (request_of(data_parallel_rank=0), "data_parallel_rank"),
        (request_of(mm_inputs=vllm.MultimodalInputs()), "mm_inputs"),
        (request_of(media_refs=vllm.MediaRefs()), "media_refs"),
        (request_of({"structural_tag": "{}"}), "sampling_params.structural_tag"),
        (request_of({"truncate_prompt_tokens": 5}), "sampling_params.truncate_prompt_tokens"),
        (request_of({"logprobs": -1}), "sampling_params.logprobs"),
        (request_of({"prompt_logprobs": -1}), "sampling_params.prompt_logprobs"),
        (request_of({"logprobs": 21}), "sampling_params.logprobs"),
        (request_of({"top_p": 2.0}), "sampling_params.top_p"),
        (request_of({"n": 65}), "sampling_params.n"),
        (request_of({"logit_bias": {-1: 1.0}}), "sampling_params.logit_bias"),
        (request_of({"stop": [""]}), "sampling_params.stop"),
        (request_of({"choice": {}}), "sampling_params.choice"),
        (request_of(tokenized={"input_ids": []}), "tokenized.input_ids"),
        (request_of(tokenized={"input_ids": [10**6]}), "tokenized.input_ids"),
        (vllm.GenerateRequest(), "input"),
        (
            vllm.GenerateRequest(text="a", sampling_params=vllm.SamplingParams(prompt_logprobs=0)),
            "sampling_params.prompt_logprobs",
        ),
        (unknown_field(), "request"),
    ],
)  # fmt: skip
async def test_what_is_wrong_or_not_supported_is_refused_by_its_name(
    gateway: Any, request_message: vllm.GenerateRequest, field: str
) -> None:
    async with gateway() as server:
        failure = await failure_of(stub_of(server).Generate(request_message))
        assert not server.engine.requests
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert failure.message.startswith(f"{field}: ")


async def test_abort_ends_a_request_as_a_gateway_does_for_a_client_that_left(gateway: Any) -> None:
    engine = FakeEngine()
    async with gateway(engine) as server:
        stub = stub_of(server)
        call = stub.Generate(request_of({"n": 2}, stream=True))
        await engine.wait_for(lambda: len(engine.requests) == 2)
        await stub.Abort(vllm.AbortRequest(request_ids=["r", "nobody"]))
        messages = await collect(call)
    assert [message.complete.finish_reason for message in messages] == ["abort", "abort"]
    assert sorted(engine.aborted) == ["r", "r#1"]


async def test_a_full_queue_is_resource_exhausted(gateway: Any) -> None:
    engine = FakeEngine()
    async with gateway(engine, max_waiting=1) as server:
        stub = stub_of(server)
        first = stub.Generate(request_of(request_id="first"))
        await engine.wait_for_request("first")
        failure = await failure_of(stub.Generate(request_of(request_id="second")))
        first.cancel()
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_tokens_are_asked_for_here_too(gateway: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\ntenant = "gateway"\nvalue = "0123456789abcdef"\n')
    async with gateway(auth_tokens=str(tokens)) as server:
        stub = stub_of(server)
        assert (await failure_of(stub.Generate(request_of()))).code is grpc.StatusCode.UNAUTHENTICATED
        assert (
            await failure_of(stub.GetModelInfo(vllm.GetModelInfoRequest()))
        ).code is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer 0123456789abcdef"),)
        await collect(stub.Generate(request_of(), metadata=metadata))
        assert server.engine.requests["gateway/r"].tenant == "gateway"


async def test_on_a_port_of_its_own_a_gateway_needs_no_token_and_is_a_tenant_of_its_own(
    gateway: Any, tmp_path: Path
) -> None:
    tokens, port = tmp_path / "tokens.toml", free_port()
    tokens.write_text('[[token]]\ntenant = "alice"\nvalue = "0123456789abcdef"\n')
    async with (
        gateway(auth_tokens=str(tokens), gateway_port=port) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        await collect(vllm_grpc.VllmEngineStub(channel).Generate(request_of()))
        made = server.engine.requests["@gateway/r"]
        assert (made.tenant, made.cache_salt) == ("@gateway", "@gateway/")
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        # Nothing else is there, and the protocol is nowhere else.
        own = pb_grpc.GenerationServiceStub(channel)
        for call in (own.GetLoads(pb.GetLoadsRequest()), stub_of(server).Generate(request_of())):
            assert (await failure_of(call)).code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_of_its_own_without_the_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="gateway_port: got 1 without gateway_protocol"):
        load_config({"model": "m", "gateway_port": 1})


async def test_a_server_that_logs_content_makes_the_text_itself_and_sends_none(gateway: Any) -> None:
    async with gateway(log_content=True) as server:
        with structlog.testing.capture_logs() as logs:
            request = vllm.GenerateRequest(request_id="r", text="the dog", stream=True)
            messages = await collect(stub_of(server).Generate(request))
            await server.app.live.wait_until_empty()
    (content,) = [line for line in logs if line["event"] == "content"]
    assert content["answers"] == ["the dog"]
    assert sum(len(message.chunk.token_ids) for message in messages) == 3
