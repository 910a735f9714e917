"""The vLLM engine protocol: what a server tells a gateway of itself, and when it offers the protocol at all."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from engine.errors import CheckpointError, ConfigError
from engine.messages import RequestOutput
from engine.stats import EngineStats
from server.app import App
from server.token_rate import TokenRate
from tests.support.fake_engine import EOS, FakeEngine
from tests.support.gateway import MODEL_CONFIG, gateway_server, make_frontend_checkpoint, request_of, stub_of
from tests.support.server_fixture import collect, failure_of, running_server, server_config

SERVICE = "vllm.grpc.engine.VllmEngine"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_frontend_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def gateway(checkpoint: Path) -> Callable[..., Any]:
    return partial(gateway_server, checkpoint)


async def test_health_follows_the_engine(gateway: Any) -> None:
    engine = FakeEngine(echo=True)
    engine.may_start.clear()
    async with gateway(engine, wait_until_ready=False) as server:
        stub = stub_of(server)
        loading = await stub.HealthCheck(vllm.HealthCheckRequest())
        assert (loading.healthy, loading.message) == (False, "the engine is loading")
        for call in (
            stub.GetModelInfo(vllm.GetModelInfoRequest()),
            stub.GetLoads(vllm.GetLoadsRequest()),
            stub.Generate(request_of()),
        ):
            assert (await failure_of(call)).code is grpc.StatusCode.UNAVAILABLE
        engine.may_start.set()
        await server.wait_for_health(1, SERVICE)
        assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
        watch = server.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        server.app.stop()  # which ends the port too, so the watch has to be there before
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_gateway_learns_the_model(gateway: Any, checkpoint: Path) -> None:
    async with gateway(served_model_name="tiny", max_prompt_tokens=100) as server:
        info = await stub_of(server).GetModelInfo(vllm.GetModelInfoRequest())
    assert (info.model_path, info.served_model_name, info.is_generation) == (str(checkpoint), "tiny", True)
    assert (info.model_type, list(info.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert (info.vocab_size, info.max_context_length, info.max_req_input_len) == (320, 512, 100)
    assert (list(info.eos_token_ids), info.bos_token_id, info.pad_token_id) == ([EOS], 1, 0)
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.6, "top_k": 20}


async def test_a_gateway_learns_the_server_and_its_load(gateway: Any) -> None:
    engine = FakeEngine()
    async with gateway(engine) as server:
        stub = stub_of(server)
        call = stub.Generate(request_of(stream=True))
        await engine.wait_for_request("r")
        engine.step(
            RequestOutput(request_id="r", token_ids=[7, 8]),
            stats=EngineStats(
                num_running=1,
                num_waiting=2,
                num_waiting_tokens=30,
                num_blocks=100,
                num_free_blocks=70,
                num_cached_blocks=5,
            ),
        )
        await call.read()
        (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
        info = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        call.cancel()
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 2, 3)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (25 * 16, 1600, 0.25)
    assert (load.max_running_requests, load.num_waiting_uncached_tokens) == (8, 30)
    assert load.gen_throughput > 0
    assert (info.active_requests, info.is_paused, info.server_type) == (1, False, "vllm-grpc")
    assert (info.block_size, info.max_num_seqs, info.model_dtype) == (16, 8, "float32")
    assert info.last_receive_timestamp > 0


async def test_the_tokenizer_comes_as_a_zip_that_is_the_same_everywhere(
    gateway: Any, checkpoint: Path
) -> None:
    archives = []
    for _ in range(2):
        async with gateway() as server:
            chunks = await collect(stub_of(server).GetTokenizer(common.GetTokenizerRequest()))
        archive = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
        assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
        archives.append(archive)
    first, second = archives
    assert first == second
    with zipfile.ZipFile(io.BytesIO(first)) as files:
        names = set(files.namelist())
        assert files.read("tokenizer.json") == (checkpoint / "tokenizer.json").read_bytes()
        assert json.loads(files.read("config.json")) == MODEL_CONFIG
    assert {"tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= names
    assert "model.safetensors" not in names


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Embed", vllm.EmbedRequest()),
        ("FlushCache", common.FlushCacheRequest()),
        ("StartProfile", common.StartProfileRequest()),
        ("SubscribeKvEvents", common.SubscribeKvEventsRequest()),
    ],
)
async def test_what_has_no_meaning_here_is_unimplemented(gateway: Any, method: str, message: Message) -> None:
    async with gateway() as server:
        failure = await failure_of(getattr(stub_of(server), method)(message))
    assert failure.code is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_names_the_protocol(gateway: Any) -> None:
    async with gateway() as server:
        call = reflection_pb2_grpc.ServerReflectionStub(server.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
        answer = await call.read()
        call.cancel()
    assert answer.HasField("file_descriptor_response")


async def test_the_protocol_is_off_unless_asked_for(checkpoint: Path) -> None:
    async with running_server(model=str(checkpoint)) as server:
        failure = await failure_of(stub_of(server).HealthCheck(vllm.HealthCheckRequest()))
    assert failure.code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_checkpoint_without_a_tokenizer_keeps_the_server_from_starting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        async with running_server(
            model=str(tmp_path), gateway_protocol="vllm", wait_until_ready=False
        ) as server:
            await server.ended


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "server.gateway_vllm", raising=False)
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    with pytest.raises(ConfigError, match=r"-e '\.\[gateway\]'"):
        App(server_config(gateway_protocol="vllm"), FakeEngine())


def test_the_rate_of_tokens_follows_the_work_and_fades() -> None:
    now = 0.0
    rate = TokenRate(lambda: now)
    for _ in range(600):
        now += 0.1
        rate.on_step([RequestOutput(request_id="r", token_ids=[1, 2])], None)
    assert rate.per_second == pytest.approx(20, rel=0.02)
    now += 60
    assert rate.per_second < 0.1
