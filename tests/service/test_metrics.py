"""The metrics after a known run, to the value; and that their documentation is complete."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import ConfigError
from engine.messages import FinishInfo, RequestTimes
from engine.stats import EngineStats, SpecObservation, StepStats
from server import generation
from server.interceptors import CallInterceptor, run_to_status
from server.metrics import Metrics, MetricsEndpoint
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.service import SERVICE_NAME
from tests.support.fake_engine import EOS, FakeEngine
from tests.support.server_fixture import RunningServer, collect, failure_of, running_server, text_request

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def times(first_token: float, last_token: float) -> RequestTimes:
    return RequestTimes(arrival=10.0, first_scheduled=10.25, first_token=first_token, last_token=last_token)


def value(server: RunningServer, name: str, **labels: str) -> float | None:
    return server.metric(f"slipstream_{name}", model="tiny", **labels)


async def run_two_requests(server: RunningServer, engine: FakeEngine) -> None:
    """One of 1 + 2 + 1 tokens, whose last step is cut by a stop; one that ends before its first step."""
    call = server.stub.Generate(text_request("the dog", request_id="a"))
    await engine.wait_for_request("a")
    engine.emit("a", [5], times=times(10.5, 10.5), num_cached_tokens=1)
    two = SpecObservation(
        method="ngram", num_drafted=2, num_verifier_accepted=1, num_accepted=1, num_emitted=2
    )
    engine.emit("a", [6, 7], times=times(10.5, 10.6), spec=[two], num_cached_tokens=1)
    cut = SpecObservation(
        method="ngram", num_drafted=3, num_verifier_accepted=3, num_accepted=1, num_emitted=1
    )
    finish = FinishInfo(reason="stop", eos_token_id=EOS)
    engine.emit("a", [EOS], times=times(10.5, 10.9), spec=[cut], finish=finish, num_cached_tokens=1)
    await collect(call)
    call = server.stub.Generate(text_request("the dog", request_id="b"))
    await engine.wait_for_request("b")
    call.cancel()
    await engine.wait_for(lambda: engine.aborted == ["b"])
    await server.app.live.wait_until_empty()


async def test_request_metrics_of_a_known_run() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        await run_two_requests(server, engine)
        num_prompt_tokens = len(engine.requests["a"].prompt_token_ids)
        assert value(server, "requests_total", finish_reason="stop") == 1
        assert value(server, "requests_total", finish_reason="cancelled") == 1
        assert value(server, "prompt_tokens_total") == num_prompt_tokens
        assert value(server, "prompt_tokens_cached_total") == 1
        assert value(server, "generation_tokens_total") == 4
        assert value(server, "time_to_first_token_sum") == pytest.approx(0.5)
        assert value(server, "queue_time_sum") == pytest.approx(0.25)
        assert value(server, "e2e_latency_sum") == pytest.approx(0.9)
        assert value(server, "time_per_output_token_sum") == pytest.approx(0.4 / 3)
        assert value(server, "request_generation_tokens_sum") == 4
        assert value(server, "request_generation_tokens_count") == 2
        assert value(server, "request_prompt_tokens_sum") == 2 * num_prompt_tokens


async def test_a_step_s_gap_is_shared_among_its_tokens() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        await run_two_requests(server, engine)
        assert value(server, "inter_token_latency_count") == 3
        assert value(server, "inter_token_latency_sum") == pytest.approx(0.4)
        assert value(server, "inter_token_latency_bucket", le="0.05") == 2  # 0.1 s for two tokens
        assert value(server, "inter_token_latency_bucket", le="0.2") == 2
        assert value(server, "inter_token_latency_bucket", le="0.5") == 3


async def test_speculation_metrics_count_after_the_cut() -> None:
    engine = FakeEngine()
    async with running_server(engine, speculators=["ngram,k=4"]) as server:
        await run_two_requests(server, engine)
        prefix = "spec_decode"
        assert value(server, f"{prefix}_verifications_total", method="ngram", k="2") == 1
        assert value(server, f"{prefix}_verifications_total", method="ngram", k="3") == 1
        drafted = [
            value(server, f"{prefix}_draft_tokens_total", method="ngram", position=str(position))
            for position in range(4)
        ]
        assert drafted == [2, 2, 1, None]
        assert value(server, f"{prefix}_accepted_tokens_total", method="ngram", position="0") == 2
        assert value(server, f"{prefix}_accepted_tokens_total", method="ngram", position="1") is None
        assert value(server, f"{prefix}_verifier_accepted_tokens_total", method="ngram") == 4
        assert value(server, f"{prefix}_emitted_tokens_total", method="ngram") == 3
        assert value(server, f"{prefix}_discarded_tokens_total", method="ngram", reason="rejected") == 1
        assert value(server, f"{prefix}_discarded_tokens_total", method="ngram", reason="after_stop") == 2
        assert value(server, f"{prefix}_acceptance_length_sum", method="ngram") == 3
        assert value(server, f"{prefix}_acceptance_length_count", method="ngram") == 2
        assert value(server, f"{prefix}_acceptance_length_bucket", method="ngram", le="5.0") == 2
        assert value(server, f"{prefix}_request_acceptance_length_sum", method="ngram") == 1.5


async def test_drafts_beyond_the_length_limit_are_discarded_over_limit() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="a"))
        await engine.wait_for_request("a")
        seen = SpecObservation(
            method="ngram", num_drafted=3, num_verifier_accepted=3, num_accepted=2, num_emitted=2
        )
        engine.emit("a", [5, 6], spec=[seen], finish=FinishInfo(reason="length"))
        await collect(call)
        name = "spec_decode_discarded_tokens_total"
        assert value(server, name, method="ngram", reason="over_limit") == 1


async def test_load_and_step_metrics_are_the_engine_s() -> None:
    engine = FakeEngine()
    start = time.time()
    async with running_server(engine) as server:
        stats = EngineStats(
            num_running=3, num_waiting=2, num_blocks=100, num_free_blocks=50, num_cached_blocks=25
        )
        step = StepStats(
            num_scheduled_tokens=40,
            phase_seconds={"schedule": 0.001, "target": 0.02},
            num_preempted=1,
            num_not_overlapped=3,
            not_drafted={"no_match": 2},
        )
        engine.step(stats=stats, step=step)
        assert value(server, "requests_running") == 3
        assert value(server, "requests_waiting") == 2
        assert value(server, "kv_cache_usage_ratio") == 0.25
        assert [value(server, "kv_blocks", state=state) for state in ("free", "used", "cached")] == [
            50,
            25,
            25,
        ]
        assert value(server, "engine_up") == 1
        assert value(server, "startup_seconds", phase="load") == 1.5
        assert start <= (value(server, "engine_start_time_seconds") or 0) <= time.time()
        assert value(server, "step_tokens_sum") == 40
        assert value(server, "step_time_sum", phase="target") == 0.02
        assert value(server, "preemptions_total") == 1
        assert value(server, "spec_decode_not_drafted_total", reason="no_match") == 2
        assert value(server, "spec_decode_not_overlapped_total") == 3
    assert value(server, "engine_up") == 0


async def test_an_engine_that_loads_is_not_up() -> None:
    engine = FakeEngine()
    engine.may_start.clear()
    async with running_server(engine, wait_until_ready=False) as server:
        assert value(server, "engine_up") == 0
        engine.may_start.set()
        await server.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
        assert value(server, "engine_up") == 1


async def test_the_time_between_messages_is_that_of_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: now))
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r", output=pb.OutputParams(stream_interval=2)))
        await engine.wait_for_request("r")
        engine.emit("r")
        assert (await call.read()).HasField("started")
        now = 101.0
        engine.emit("r", [5])
        assert (await call.read()).HasField("delta")
        for seconds in (0.25, 0.75):
            now += seconds
            engine.emit("r", [6, 7])
            assert (await call.read()).HasField("delta")
        now = 200.0
        engine.emit("r", finish=FinishInfo(reason="length"))
        assert (await call.read()).HasField("finished")
        assert value(server, "inter_message_latency_count") == 2
        assert value(server, "inter_message_latency_sum") == 1.0
        assert value(server, "inter_message_latency_bucket", le="0.5") == 1


async def test_a_request_that_ended_leaves_nothing_behind() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        await run_two_requests(server, engine)
        engine.emit("b", [9], times=times(20.0, 20.0))  # was on its way when its client left
        assert value(server, "inter_token_latency_count") == 3
        assert value(server, "generation_tokens_total") == 5


async def test_calls_are_counted_by_method_and_status() -> None:
    async with running_server() as server:
        await collect(server.stub.Generate(text_request()))
        await failure_of(server.stub.Generate(pb.GenerateRequest()))
        for code in ("OK", "INVALID_ARGUMENT"):
            assert await server.handled("Generate", code) == 1
        labels = {"grpc_service": SERVICE_NAME, "grpc_method": "Generate"}
        assert server.metric("grpc_server_started_total", **labels) == 2
        assert server.metric("grpc_server_handling_seconds_count", **labels) == 2


@pytest.mark.parametrize(
    ("timeout", "remaining", "code"),
    [
        (None, None, "CANCELLED"),
        (30.0, 20.0, "CANCELLED"),
        (0.05, 0.0, "DEADLINE_EXCEEDED"),
        (0.05, 0.015, "DEADLINE_EXCEEDED"),  # passed at the client, which reset the stream
        (30.0, 0.3, "DEADLINE_EXCEEDED"),  # sent rounded up by 1 %
    ],
)
async def test_a_call_that_is_cancelled_counts_as_what_cancelled_it(
    timeout: float | None, remaining: float | None, code: str
) -> None:
    left = iter((timeout, remaining))
    codes: list[str] = []

    async def cancelled(request: object, context: object) -> None:
        raise asyncio.CancelledError

    context = SimpleNamespace(time_remaining=lambda: next(left))
    with pytest.raises(asyncio.CancelledError):
        await run_to_status(cancelled, None, context, lambda status: codes.append(status.name))
    assert codes == [code]


async def test_a_call_cancelled_before_its_deadline_is_counted_as_cancelled() -> None:
    engine = FakeEngine()
    async with running_server(engine) as server:
        call = server.stub.Generate(text_request(request_id="r"), timeout=30.0)
        await engine.wait_for_request("r")
        call.cancel()
        await engine.wait_for(lambda: engine.aborted == ["r"])
        assert await server.handled("Generate", "CANCELLED") == 1


def test_the_endpoint_shows_the_registry() -> None:
    registry = CollectorRegistry()
    Metrics(registry, "tiny", 4)
    with MetricsEndpoint(registry, "127.0.0.1", 0) as endpoint:
        url = f"http://127.0.0.1:{endpoint.port}/metrics"
        with urllib.request.urlopen(url) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        assert "slipstream_engine_up" in {family.name for family in families}
        with pytest.raises(ConfigError, match=f"metrics_port: cannot listen on 127.0.0.1:{endpoint.port}"):
            MetricsEndpoint(registry, "127.0.0.1", endpoint.port)


def test_every_metric_is_documented_with_its_type_and_labels() -> None:
    registry = CollectorRegistry()
    Metrics(registry, "tiny", 4)
    CallInterceptor(registry)
    described = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| `(\w+)` \| (\w+) \| ([\w, ]+) \|", line):
            described[row[1]] = (row[2], tuple(row[3].split(", ")))
    exposed = {}
    for collector in registry._collector_to_names:
        assert isinstance(collector, MetricWrapperBase)
        for family in collector.describe():
            name = family.name + ("_total" if family.type == "counter" else "")
            exposed[name] = (family.type, tuple(collector._labelnames))
    assert described == exposed
