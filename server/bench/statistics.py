"""From the records of a load run to its report. Pure: no clock, no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from server.bench.driver import RequestRecord
from server.bench.schema import LoadReport, SpeculationReport, Summary
from server.pb.slipstream.v1 import generation_pb2 as pb


def summarize(values: Sequence[float]) -> Summary:
    """Mean, percentiles (linear interpolation) and maximum."""
    if not values:
        return Summary()
    p50, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    return Summary(
        count=len(values), mean=float(np.mean(values)), p50=p50, p95=p95, p99=p99, max=float(max(values))
    )


def inter_token_latencies(record: RequestRecord) -> list[float]:
    """One value per token after the first message: the gap before a message is shared among its tokens.

    Example: messages at 0.0 s (1 token), 0.3 s (3 tokens), 0.4 s (1 token) give 0.1, 0.1, 0.1, 0.1.
    """
    latencies = []
    for before, message in zip(record.arrivals, record.arrivals[1:], strict=False):
        latencies += [(message.at - before.at) / message.num_tokens] * message.num_tokens
    return latencies


def inter_message_latencies(record: RequestRecord) -> list[float]:
    """Time between messages that carried tokens."""
    return [b.at - a.at for a, b in zip(record.arrivals, record.arrivals[1:], strict=False)]


def time_per_output_token(record: RequestRecord) -> float | None:
    """First to last token, over the tokens after the first; None for fewer than two tokens."""
    num_tokens = sum(message.num_tokens for message in record.arrivals)
    if num_tokens < 2:
        return None
    return (record.arrivals[-1].at - record.arrivals[0].at) / (num_tokens - 1)


def speculation_reports(
    stats: Sequence[pb.SpeculationStats], *, is_synthetic: bool = False
) -> list[SpeculationReport]:
    """Totals by method of the requests that had drafts; the mean length is weighted by verifications."""
    by_method: dict[str, list[pb.SpeculationStats]] = {}
    for entry in stats:
        if entry.verifications:
            by_method.setdefault(entry.method, []).append(entry)
    return [
        _speculation_report(method, entries, is_synthetic) for method, entries in sorted(by_method.items())
    ]


def _speculation_report(
    method: str, entries: list[pb.SpeculationStats], is_synthetic: bool
) -> SpeculationReport:
    accepted: Counter[int] = Counter()
    offered: Counter[int] = Counter()
    for entry in entries:
        accepted.update(dict(enumerate(entry.accepted_per_position)))
        offered.update(dict(enumerate(entry.offered_per_position)))
    verifications = sum(entry.verifications for entry in entries)
    emitted = sum(entry.acceptance_length * entry.verifications for entry in entries)
    return SpeculationReport(
        method=method,
        is_synthetic=is_synthetic,
        verifications=verifications,
        draft_tokens=sum(entry.draft_tokens for entry in entries),
        accepted_tokens=sum(entry.accepted_tokens for entry in entries),
        acceptance_length=emitted / verifications,
        acceptance_rate_by_position=[accepted[i] / n if (n := offered[i]) else 0.0 for i in sorted(offered)],
    )


def load_report(
    model: str, records: Sequence[RequestRecord], *, synthetic_acceptance: Sequence[float] = ()
) -> LoadReport:
    """Latencies are those of completed requests, tokens and messages are of all; `records` is not empty."""
    completed = [record for record in records if record.is_completed]
    errors = Counter(record.error or "NO_FINISH" for record in records if not record.is_completed)
    ends = [record.finished for record in completed if record.finished is not None]
    duration = max(record.ended for record in records) - min(record.due for record in records)
    num_tokens = sum(message.num_tokens for record in records for message in record.arrivals)
    num_messages = sum(len(record.arrivals) for record in records)
    per_token = [value for record in completed if (value := time_per_output_token(record)) is not None]
    return LoadReport(
        model=model,
        synthetic_acceptance=list(synthetic_acceptance),
        duration=duration,
        num_requests=len(records),
        num_completed=len(completed),
        errors=dict(errors),
        prompt_tokens=sum(end.usage.prompt_tokens for end in ends),
        cached_tokens=sum(end.usage.cached_tokens for end in ends),
        completion_tokens=num_tokens,
        num_messages=num_messages,
        requests_per_second=len(completed) / duration,
        tokens_per_second=num_tokens / duration,
        messages_per_second=num_messages / duration,
        time_to_first_token=summarize([r.arrivals[0].at - r.due for r in completed if r.arrivals]),
        inter_token_latency=summarize([v for record in completed for v in inter_token_latencies(record)]),
        inter_message_latency=summarize([v for record in completed for v in inter_message_latencies(record)]),
        time_per_output_token=summarize(per_token),
        e2e_latency=summarize([record.ended - record.due for record in completed]),
        speculation=speculation_reports(
            [end.speculation for end in ends], is_synthetic=bool(synthetic_acceptance)
        ),
    )
