"""Latency and acceptance figures of the load generator, from records made by hand."""

from __future__ import annotations

import pytest

from server.bench.driver import Arrival, RequestRecord
from server.bench.statistics import (
    inter_message_latencies,
    inter_token_latencies,
    load_report,
    speculation_reports,
    summarize,
    time_per_output_token,
)
from server.pb.slipstream.v1 import generation_pb2 as pb


def record(*arrivals: tuple[float, int], due: float = 0.0, **fields: object) -> RequestRecord:
    arrived = [Arrival(at, num_tokens) for at, num_tokens in arrivals]
    ended = arrived[-1].at if arrived else due + 1.0
    made = RequestRecord(due=due, arrivals=arrived, ended=ended, finished=pb.Finished())
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_the_gap_before_a_message_is_shared_among_its_tokens() -> None:
    latencies = inter_token_latencies(record((0.0, 1), (0.3, 3), (0.4, 1)))
    assert latencies == pytest.approx([0.1, 0.1, 0.1, 0.1])


def test_inter_message_latency_is_one_value_per_message() -> None:
    assert inter_message_latencies(record((0.0, 1), (0.3, 3), (0.4, 1))) == pytest.approx([0.3, 0.1])


def test_time_per_output_token_counts_the_tokens_after_the_first() -> None:
    assert time_per_output_token(record((1.0, 1), (1.3, 3), (1.4, 1))) == pytest.approx(0.1)
    assert time_per_output_token(record((1.0, 1))) is None


def test_percentiles_and_the_empty_distribution() -> None:
    summary = summarize([float(value) for value in range(101)])
    assert (summary.count, summary.mean, summary.p50) == (101, 50.0, 50.0)
    assert (summary.p95, summary.p99, summary.max) == (95.0, 99.0, 100.0)
    assert summarize([]).count == 0


def test_acceptance_length_is_weighted_by_verifications() -> None:
    few = pb.SpeculationStats(method="ngram", verifications=1, acceptance_length=4.0, draft_tokens=3)
    many = pb.SpeculationStats(method="ngram", verifications=3, acceptance_length=2.0, draft_tokens=9)
    (report,) = speculation_reports([few, many, pb.SpeculationStats(method="none")])
    assert report.acceptance_length == pytest.approx(2.5)
    assert (report.method, report.verifications, report.draft_tokens) == ("ngram", 4, 12)


def test_acceptance_rate_by_position_adds_up_drafts_of_unequal_length() -> None:
    short = pb.SpeculationStats(
        method="mtp", verifications=1, accepted_per_position=[1], offered_per_position=[1]
    )
    long = pb.SpeculationStats(
        method="mtp", verifications=2, accepted_per_position=[1, 1], offered_per_position=[2, 2]
    )
    (report,) = speculation_reports([short, long])
    assert report.acceptance_rate_by_position == pytest.approx([2 / 3, 1 / 2])


def test_methods_are_reported_apart() -> None:
    stats = [pb.SpeculationStats(method=method, verifications=1) for method in ("ngram", "mtp")]
    assert [report.method for report in speculation_reports(stats)] == ["mtp", "ngram"]


def test_latencies_are_of_completed_requests_and_errors_are_counted_by_status() -> None:
    good = record((0.5, 1), (1.0, 1), due=0.0)
    refused = record(due=0.0, ended=0.1, error="RESOURCE_EXHAUSTED", finished=None)
    broken = record((0.6, 1), (2.0, 3), due=0.0, error="UNAVAILABLE", finished=None)
    report = load_report("tiny", [good, refused, broken])
    assert (report.num_requests, report.num_completed) == (3, 1)
    assert report.errors == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert report.time_to_first_token.count == 1
    assert report.time_to_first_token.mean == pytest.approx(0.5)
    assert report.completion_tokens == 6
    assert report.duration == pytest.approx(2.0)
    assert report.tokens_per_second == pytest.approx(3.0)


def test_a_run_in_which_everything_failed_has_a_report() -> None:
    report = load_report("tiny", [record(error="UNAVAILABLE", finished=None)])
    assert report.num_completed == 0
    assert report.e2e_latency.count == 0
