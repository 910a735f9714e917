"""Traces: which spans a call leaves behind, whose trace they belong to, and what they never hold."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from engine.errors import ConfigError
from engine.messages import FinishInfo, RequestTimes
from engine.stats import SpecObservation
from server import tracing_otel
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.tracing import Tracing, make_tracing
from server.tracing_otel import phases_of
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import collect, failure_of, running_server, text_request
from tests.support.trace_collector import TraceCollector, attributes_of, trace_collector
from tools.server_process import free_port

GENERATE = "slipstream.v1.GenerationService/Generate"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),)
STATUS_ERROR = 2


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[TraceCollector]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with trace_collector() as running:
        yield running


async def test_the_spans_of_a_request_continue_its_caller_s_trace(collector: TraceCollector) -> None:
    async with running_server(trace_endpoint=collector.url) as server:
        await collect(server.stub.Generate(text_request("the dog"), metadata=TRACEPARENT))
    (call,) = collector.named(GENERATE)
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert attributes_of(call)["rpc.grpc.status_code"] == 0
    assert attributes_of(call)["gen_ai.usage.input_tokens"] == 2
    phases = [span for span in collector.spans if span is not call]
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert {span.parent_span_id for span in phases} == {call.span_id}
    assert {span.trace_id for span in phases} == {call.trace_id}


async def test_phases_follow_one_another_and_say_what_drafts_brought(collector: TraceCollector) -> None:
    engine = FakeEngine()
    async with running_server(engine, trace_endpoint=collector.url) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        arrival = (await engine.wait_for_request("r")).arrival_time
        times = RequestTimes(
            arrival=arrival, first_scheduled=arrival + 1, first_token=arrival + 3, last_token=arrival + 7
        )
        spec = SpecObservation(
            method="ngram", num_drafted=3, num_verifier_accepted=2, num_accepted=2, num_emitted=3
        )
        engine.emit("r", [7, 8, 9], spec=[spec], times=times, finish=FinishInfo(reason="length"))
        await collect(call)
    queue, prefill, decode = (collector.named(name)[0] for name in ("queue", "prefill", "decode"))
    seconds = [
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in (queue, prefill, decode)
    ]
    assert seconds == pytest.approx([1, 2, 4], abs=1e-3)
    assert abs(queue.start_time_unix_nano / 1e9 - time.time()) < 60
    assert attributes_of(decode) == {
        "slipstream.choice_id": "r",
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "slipstream.speculation.method": "ngram",
        "slipstream.speculation.verifications": 1,
        "slipstream.speculation.draft_tokens": 3,
        "slipstream.speculation.accepted_tokens": 2,
        "slipstream.speculation.acceptance_length": 3.0,
        "slipstream.speculation.accepted_per_position": [1, 1, 0],
        "slipstream.speculation.offered_per_position": [1, 1, 1],
    }


async def test_every_choice_has_its_phases(collector: TraceCollector) -> None:
    async with running_server(trace_endpoint=collector.url) as server:
        await collect(server.stub.Generate(text_request(request_id="r", n=2)))
    ids = sorted(attributes_of(span)["slipstream.choice_id"] for span in collector.named("decode"))
    assert ids == ["r", "r#1"]


async def test_a_request_that_never_started_has_only_waited(collector: TraceCollector) -> None:
    engine = FakeEngine()
    async with running_server(engine, trace_endpoint=collector.url) as server:
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        call.cancel()
        await engine.wait_for(lambda: engine.aborted == ["r"])
    phases = [span for span in collector.spans if span.name != GENERATE]
    assert [span.name for span in phases] == ["queue"]
    assert attributes_of(phases[0])["gen_ai.response.finish_reasons"] == ["cancelled"]
    (span,) = collector.named(GENERATE)
    assert attributes_of(span)["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]


async def test_a_fault_of_the_server_is_an_error_and_a_wrong_request_is_none(
    collector: TraceCollector,
) -> None:
    engine = FakeEngine()
    async with running_server(engine, trace_endpoint=collector.url) as server:
        await failure_of(server.stub.Generate(text_request("")))
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        engine.emit("r", finish=FinishInfo(reason="error", message="logits are not numbers"))
        assert (await failure_of(call)).code is grpc.StatusCode.INTERNAL
    refused, failed = collector.named(GENERATE)
    assert (refused.status.code, failed.status.code) == (0, STATUS_ERROR)
    assert failed.status.message == "INTERNAL"


async def test_no_prompt_no_output_and_no_health_check_is_sent(collector: TraceCollector) -> None:
    async with running_server(trace_endpoint=collector.url) as server:
        assert await server.is_serving()
        await collect(server.stub.Generate(text_request("the secret dog")))
        await failure_of(server.stub.Generate(text_request("the secret dog", model="secret model")))
    sent = b"".join(collector.bodies)
    assert b"secret" not in sent
    assert b"Health" not in sent


async def test_a_collector_that_is_not_there_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_otel, "EXPORT_TIMEOUT", 0.1)
    async with running_server(trace_endpoint=f"http://127.0.0.1:{free_port()}/v1/traces") as server:
        messages = await collect(server.stub.Generate(text_request()))
    assert messages[-1].finished.reason == pb.FINISH_REASON_STOP


async def test_the_end_of_the_engine_does_not_hold_up_the_last_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = threading.Event()
    monkeypatch.setattr(Tracing, "close", lambda tracing: sent.set())

    class StopsAfterTheSpans(FakeEngine):
        async def _shut_down(self) -> None:
            self.is_stopped = await asyncio.to_thread(sent.wait, 10.0)

    engine = StopsAfterTheSpans()
    async with running_server(engine):
        pass
    assert engine.is_stopped


def test_without_an_endpoint_nothing_is_traced_and_nothing_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "server.tracing_otel")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert type(make_tracing(None, "tiny")) is Tracing
    with pytest.raises(ConfigError, match=r"-e '\.\[tracing\]'"):
        make_tracing("http://127.0.0.1:4318/v1/traces", "tiny")


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="trace_endpoint: got 'localhost:4318', expected a URL"):
        make_tracing("localhost:4318", "tiny")


def test_what_was_cut_short_ends_now() -> None:
    assert list(phases_of(RequestTimes(), 9.0)) == []
    assert list(phases_of(RequestTimes(arrival=1.0, first_scheduled=2.0), 9.0)) == [
        ("queue", 1.0, 2.0),
        ("prefill", 2.0, 9.0),
    ]
