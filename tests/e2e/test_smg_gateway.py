"""The OpenAI API without a line of HTTP of ours: the official client, a real gateway, a real server."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tests.support.smg_process import SmgProcess, why_smg_cannot_run
from tools.server_process import ServerProcess, free_port

pytestmark = pytest.mark.skipif(why_smg_cannot_run() is not None, reason=str(why_smg_cannot_run()))

MODEL = "tiny-llama"
MESSAGES: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
POLL_SECONDS = 0.05
MAX_SECONDS = 30.0


@pytest.fixture(scope="module")
def worker(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its path of the checkpoint leads nowhere from where the gateway runs, as in another pod."""
    arguments = ["--gateway-protocol", "vllm", "--num-threads", "1"]
    arguments += ["--speculator", "ngram,k=4", "--draft-policy", "ngram"]  # drafts, whatever they cost
    log = tmp_path_factory.mktemp("worker") / "server.log"
    with ServerProcess(os.path.relpath(tiny_checkpoint), log, arguments=arguments) as process:
        yield process


@pytest.fixture(scope="module")
def client(worker: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        SmgProcess(worker.address, tmp_path_factory.mktemp("smg")) as gateway,
        openai.OpenAI(
            base_url=f"{gateway.url}/v1",
            api_key="unused",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as made,
    ):
        yield made


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, **{"max_tokens": 12, "temperature": 0, **options}
    )


def ask_directly(worker: ServerProcess, **output: Any) -> pb.Choice:
    """The same question over our own protocol."""
    request = pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(**message) for message in MESSAGES]),
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=12),
        output=pb.OutputParams(**output),
    )
    with grpc.insecure_channel(worker.address) as channel:
        answer = pb_grpc.GenerationServiceStub(channel).GenerateOnce(pb.GenerateOnceRequest(request=request))
    (choice,) = answer.choices
    return choice


def metric(worker: ServerProcess, name: str, **labels: str) -> float:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{worker.metrics_port}/metrics", timeout=10) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = (sample for family in families for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def test_the_gateway_got_the_tokenizer_from_the_server(client: openai.OpenAI, worker: ServerProcess) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert metric(worker, "grpc_server_handled_total", grpc_method="GetTokenizer", grpc_code="OK") == 1


def test_a_chat_is_answered_as_over_our_own_protocol(client: openai.OpenAI, worker: ServerProcess) -> None:
    answer = chat(client)
    direct = ask_directly(worker)
    (choice,) = answer.choices
    assert choice.message.content == direct.text
    assert choice.finish_reason == "length"
    usage = direct.finished.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (usage.prompt_tokens, 12)


def test_a_stream_brings_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == chat(client).choices[0].message.content
    assert sum(map(bool, deltas)) > 1
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 12


def test_drafts_are_told_as_predictions(client: openai.OpenAI) -> None:
    details = chat(client, max_tokens=100).usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0


def test_logprobs_are_those_of_our_own_protocol(client: openai.OpenAI, worker: ServerProcess) -> None:
    (choice,) = chat(client, logprobs=True, top_logprobs=2).choices
    direct = ask_directly(worker, logprobs=2)
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(
        [entry.token.logprob for entry in direct.logprobs], rel=1e-4
    )
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_several_answers_differ_and_repeat_with_their_seed(client: openai.OpenAI) -> None:
    def contents() -> list[str]:
        answer = chat(client, n=3, temperature=1.0, seed=7)
        assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
        return [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = contents()
    assert len(set(first)) == 3
    assert contents() == first


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_schema_is_kept_to(client: openai.OpenAI, is_streamed: bool) -> None:
    schema = {"name": "colours", "strict": True, "schema": SCHEMA}
    options = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 200}
    if is_streamed:
        chunks = chat(client, stream=True, **options)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    else:
        (choice,) = chat(client, **options).choices
        assert choice.finish_reason == "stop"
        text = choice.message.content
    value = json.loads(text)
    assert value["colour"] in ("red", "green")
    assert value["count"] in (1, 2, 3)


def test_a_request_whose_client_left_is_ended(client: openai.OpenAI, worker: ServerProcess) -> None:
    """The gateway does not cancel the call: it says Abort."""
    before = metric(worker, "slipstream_requests_total", finish_reason="cancelled")
    stream = chat(client, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(stream)
    stream.close()
    deadline = time.monotonic() + MAX_SECONDS
    while metric(worker, "slipstream_requests_total", finish_reason="cancelled") == before:
        assert time.monotonic() < deadline, "the request went on"
        time.sleep(POLL_SECONDS)
    assert metric(worker, "grpc_server_handled_total", grpc_method="Abort", grpc_code="OK") >= 1


def test_what_the_server_refuses_is_a_bad_request_with_its_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.regex"):
        chat(client, extra_body={"regex": "("})


def test_a_server_with_tokens_serves_a_gateway_on_a_port_of_its_own(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """smg sends none."""
    tokens, port = tmp_path / "tokens.toml", free_port()
    tokens.write_text('[[token]]\ntenant = "alice"\nvalue = "0123456789abcdef"\n')
    arguments = ["--num-threads", "1", "--auth-tokens", str(tokens)]
    arguments += ["--gateway-protocol", "vllm", "--gateway-port", str(port)]
    with (
        ServerProcess(tiny_checkpoint, tmp_path / "server.log", arguments=arguments) as server,
        SmgProcess(f"127.0.0.1:{port}", tmp_path) as gateway,
        openai.OpenAI(
            base_url=f"{gateway.url}/v1",
            api_key="unused",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client,
        grpc.insecure_channel(server.address) as channel,
    ):
        answer = client.completions.create(model=MODEL, prompt="the dog", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        with pytest.raises(grpc.RpcError) as refused:
            pb_grpc.GenerationServiceStub(channel).GetLoads(pb.GetLoadsRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
