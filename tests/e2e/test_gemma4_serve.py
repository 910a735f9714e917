"""A tiny Gemma 4 with its assistant behind the real server process: the streams of plain decoding, in fewer steps, and
metrics that say by how much.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tests.support.tiny_gemma4 import WINDOW, Gemma4Pair, make_tiny_gemma4_pair
from tests.support.tiny_models import make_tiny_tokenizer
from tools.server_process import ServerProcess

METHOD = "gemma4_mtp"
K = 4
MAX_TOKENS = 6 * WINDOW
TEXTS = ("the quick brown fox", "a request is a prompt", "naïve café, größer", "0123456789", "tokens; a step")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Gemma4Pair:
    pair = make_tiny_gemma4_pair(tmp_path_factory.mktemp("pair"), "ple_shared")
    make_tiny_tokenizer(pair.target)
    return pair


@pytest.fixture(scope="module")
def server(pair: Gemma4Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log: Path = tmp_path_factory.mktemp("log") / "server.log"
    arguments = ("--num-threads", "1", "--speculator", f"{METHOD},model={pair.assistant},k={K}")
    with ServerProcess(pair.target, log, arguments=arguments) as process:
        yield process


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[pb_grpc.GenerationServiceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield pb_grpc.GenerationServiceStub(channel)


def stream(
    stub: pb_grpc.GenerationServiceStub, request: pb.GenerateRequest
) -> tuple[list[int], str, pb.Finished]:
    responses = list(stub.Generate(request))
    token_ids = [token_id for response in responses for token_id in response.delta.token_ids]
    return token_ids, "".join(response.delta.text for response in responses), responses[-1].finished


def make_requests(method: str, pair: Gemma4Pair) -> list[pb.GenerateRequest]:
    """Texts, greedy and seeded, and starts of the sequences that the assistant knows."""
    stopping = pb.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    speculation = pb.SpeculationParams(method=method)
    greedy = pb.SamplingParams(temperature=0.0)
    seeded = pb.SamplingParams(temperature=0.8, top_p=0.9, seed=7)
    texts = [
        pb.GenerateRequest(text=text, sampling=sampling, stopping=stopping, speculation=speculation)
        for text in TEXTS
        for sampling in (greedy, seeded)
    ]
    tokens = [
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=sequence[:20]),
            sampling=greedy,
            stopping=pb.StoppingParams(max_tokens=20, ignore_eos=True),
            speculation=speculation,
        )
        for sequence in pair.sequences
    ]
    return [*texts, *tokens]


def read_metrics(server: ServerProcess) -> dict[str, float]:
    """Values of the speculation metrics of the method, positions summed up."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
        values: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.labels.get("method") == METHOD and "le" not in sample.labels:
                name = sample.name.removeprefix("slipstream_spec_decode_")
                values[name] = values.get(name, 0.0) + sample.value
    return values


def test_streams_equal_plain_decoding_and_metrics_show_the_acceptance_length(
    server: ServerProcess, stub: pb_grpc.GenerationServiceStub, pair: Gemma4Pair
) -> None:
    plain = [stream(stub, request) for request in make_requests("none", pair)]
    assert read_metrics(server).get("emitted_tokens_total", 0.0) == 0.0
    with ThreadPoolExecutor(max_workers=8) as pool:
        drafted = list(pool.map(lambda request: stream(stub, request), make_requests(METHOD, pair)))
    for (token_ids, text, finished), (expected_ids, expected_text, expected) in zip(
        drafted, plain, strict=True
    ):
        assert (token_ids, text, finished.reason) == (expected_ids, expected_text, expected.reason)
        assert expected.speculation.method == "none"
        assert finished.speculation.method == METHOD
    stats = [finished.speculation for _, _, finished in drafted]
    num_verifications = sum(item.verifications for item in stats)
    num_accepted = sum(item.accepted_tokens for item in stats)
    assert all(0 < sum(item.offered_per_position) == item.draft_tokens for item in stats)
    values = read_metrics(server)
    assert values["acceptance_length_count"] == num_verifications
    assert values["accepted_tokens_total"] == num_accepted > 0
    length = values["acceptance_length_sum"] / values["acceptance_length_count"]
    assert 1.1 < length < K + 1
    assert length == pytest.approx(1 + num_accepted / num_verifications)


def test_the_server_says_what_its_kv_cache_costs(stub: pb_grpc.GenerationServiceStub) -> None:
    """Of five layers three have keys and values: a full one of 32 features, two sliding ones of 16, in float64."""
    info = stub.GetServerInfo(pb.GetServerInfoRequest())
    groups = {group.name: (group.window, group.bytes_per_token) for group in info.kv_groups}
    assert groups == {"full": (0, 2 * 32 * 8), "sliding": (WINDOW, 2 * 2 * 16 * 8)}
    assert list(info.speculators) == [METHOD]
