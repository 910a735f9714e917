"""A real Prometheus scrapes a real server that speculates: every dashboard and every rule then has data."""

from __future__ import annotations

import functools
import math
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tests.support.monitoring import (
    DASHBOARDS,
    RULES,
    load_dashboard,
    needs_prometheus,
    panel_queries,
    replace_variables,
    rules,
)
from tests.support.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer
from tools.dashboards.prometheus import PrometheusProcess
from tools.server_process import ServerProcess

pytestmark = needs_prometheus

DEADLINE_SECONDS = 30.0
POLL_SECONDS = 0.1
PROMPTS = ("the dog the dog the dog", "a request is a request is", "the quick brown fox")
# Label -> why no series of the run has it.
LABELS_WITHOUT_VALUES = {"namespace": "Prometheus adds it in Kubernetes only"}


@dataclass(frozen=True)
class Observed:
    """A server after some load, and the Prometheus that has seen it before and after."""

    server: ServerProcess
    prometheus: PrometheusProcess


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS:.0f} s for {what}"
        time.sleep(POLL_SECONDS)


def load(stub: pb_grpc.GenerationServiceStub) -> None:
    """Requests that draft, that do not want to, that a client leaves, and that are refused."""
    for method in ("ngram", "none"):
        for prompt in PROMPTS:
            request = pb.GenerateRequest(
                text=prompt,
                sampling=pb.SamplingParams(temperature=0.0),
                stopping=pb.StoppingParams(max_tokens=40, ignore_eos=True),
                speculation=pb.SpeculationParams(method=method),
            )
            assert list(stub.Generate(request))[-1].finished.reason == pb.FINISH_REASON_LENGTH
    call = stub.Generate(request)
    next(call)
    call.cancel()
    with pytest.raises(grpc.RpcError):
        list(stub.Generate(pb.GenerateRequest()))


def scraped(prometheus: PrometheusProcess, since: float) -> bool:
    """Whether a scrape began after the time `since`."""
    series = prometheus.query("timestamp(slipstream_engine_up)")
    return bool(series) and float(series[0]["value"][1]) > since


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("monitoring")
    checkpoint = make_tiny_tokenizer(make_tiny_checkpoint(folder / "tiny-llama", "llama", dtype="float32"))
    arguments = ("--num-threads", "1", "--speculator", "ngram,k=3")
    with (
        ServerProcess(checkpoint, folder / "server.log", arguments=arguments) as server,
        PrometheusProcess(folder, [f"127.0.0.1:{server.metrics_port}"], rules=RULES) as prometheus,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = pb_grpc.GenerationServiceStub(channel)
        for _ in range(2):  # a rate needs two scrapes with something between them
            load(stub)
            wait_for(functools.partial(scraped, prometheus, time.time()), "a scrape")
        yield Observed(server, prometheus)


def has_data(prometheus: PrometheusProcess, expression: str) -> bool:
    return any(not math.isnan(float(series["value"][1])) for series in prometheus.query(expression))


def test_every_query_of_every_dashboard_returns_data(observed: Observed) -> None:
    without = [str(query) for query in panel_queries() if not has_data(observed.prometheus, query.expression)]
    assert not without, "\n".join(without)


def test_every_variable_of_every_dashboard_has_values(observed: Observed) -> None:
    for path in DASHBOARDS:
        for variable in load_dashboard(path)["templating"]["list"]:
            if variable["type"] == "datasource" or variable["name"] in LABELS_WITHOUT_VALUES:
                continue
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert match, variable["query"]
            series = observed.prometheus.query(replace_variables(match[1]))
            assert {one["metric"].get(match[2]) for one in series} - {None}, variable["query"]


def test_every_rule_is_evaluated_and_every_recording_has_data(observed: Observed) -> None:
    records = [rule["record"] for rule in rules() if "record" in rule]
    prometheus = observed.prometheus
    wait_for(lambda: all(has_data(prometheus, record) for record in records), "the recording rules")
    loaded = prometheus.rules()
    assert len(loaded) == len(rules())
    assert {(rule["name"], rule["health"]) for rule in loaded} == {(rule["name"], "ok") for rule in loaded}
    firing = [rule["name"] for rule in loaded if rule.get("state") == "firing"]
    assert not firing


def test_promtool_accepts_the_metrics_of_the_server(observed: Observed) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{observed.server.metrics_port}/metrics") as response:
        text = response.read()
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
