"""A real `slipstream serve` process on a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tests.support.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer
from tools.server_process import ServerProcess

ONE_THREAD = ("--num-threads", "1")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny-llama"
    return make_tiny_tokenizer(make_tiny_checkpoint(path, "llama", dtype="float32"))


@pytest.fixture(scope="session")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Shared by the tests that leave it as it is."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with ServerProcess(tiny_checkpoint, log, arguments=ONE_THREAD) as process:
        yield process


@pytest.fixture
def own_server(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """For the tests that end it."""
    with ServerProcess(tiny_checkpoint, tmp_path / "server.log", arguments=ONE_THREAD) as process:
        yield process


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[pb_grpc.GenerationServiceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield pb_grpc.GenerationServiceStub(channel)
