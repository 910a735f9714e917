"""A server that offers the vLLM engine protocol, over a scripted engine, and requests in that protocol."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import RunningServer, running_server
from tests.support.tiny_models import make_tiny_tokenizer

PROMPT = [40, 41, 42]
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "pad_token_id": None,
}


def make_frontend_checkpoint(path: Path) -> Path:
    """All of a checkpoint that a frontend reads, and a file that it does not."""
    make_tiny_tokenizer(path)
    (path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def gateway_server(
    checkpoint: Path, engine: FakeEngine | None = None, **options: Any
) -> AbstractAsyncContextManager[RunningServer]:
    """`running_server` with the protocol on."""
    return running_server(engine, model=str(checkpoint), gateway_protocol="vllm", **options)


def stub_of(server: RunningServer) -> Any:
    return vllm_grpc.VllmEngineStub(server.channel)


def request_of(params: dict[str, Any] | None = None, **fields: Any) -> vllm.GenerateRequest:
    """Request `r`, with a prompt of three tokens unless told otherwise."""
    fields = {"request_id": "r", "tokenized": {"input_ids": PROMPT}, **fields}
    return vllm.GenerateRequest(sampling_params=vllm.SamplingParams(**params or {}), **fields)
