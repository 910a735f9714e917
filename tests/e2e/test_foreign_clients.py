"""Clients that are not ours: Node's grpc-js from the .proto file, buf curl from server reflection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.node_packages import install_node_program
from tools.server_process import ServerProcess

HERE = Path(__file__).parent
PROTOS = HERE.parent.parent / "protos"
TIMEOUT = 60


def messages_of(command: list[str], cwd: Path | None = None) -> list[dict[str, Any]]:
    """Run a client; the JSON objects that it printed, whatever lies between them."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert result.returncode == 0, result.stderr
    decoder = json.JSONDecoder()
    messages = []
    rest = result.stdout.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        messages.append(message)
        rest = rest[end:].lstrip()
    return messages


def test_node_streams_a_generation(server: ServerProcess) -> None:
    client = install_node_program(HERE / "node_client")
    messages = messages_of(["node", "stream.mjs", server.address, str(PROTOS), "the fox"], cwd=client)
    assert messages[0]["event"] == "started"
    assert sum(len(message["delta"]["token_ids"]) for message in messages if message["event"] == "delta") == 8
    assert messages[-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"


def test_buf_curl_streams_a_generation_by_reflection(server: ServerProcess) -> None:
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("buf is not installed beside this Python (pip install -e '.[dev]')")
    request = {
        "text": "the fox",
        "sampling": {"temperature": 0},
        "stopping": {"max_tokens": 8, "ignore_eos": True},
    }
    method = f"http://{server.address}/slipstream.v1.GenerationService/Generate"
    options = ["--protocol", "grpc", "--http2-prior-knowledge", "--data", json.dumps(request)]
    messages = messages_of([str(buf), "curl", *options, method])
    assert "started" in messages[0]
    assert sum(len(message.get("delta", {}).get("tokenIds", [])) for message in messages) == 8
    assert messages[-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"
