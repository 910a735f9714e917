"""The dashboard Serving: what clients see, how loaded the servers are, where steps spend their time."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import assemble
from tools.dashboards.panels import PanelBuilder, Query, Steps, distribution, graph, number
from tools.dashboards.queries import (
    QUANTILES,
    buckets,
    gauge,
    grpc_rate,
    mean,
    quantile,
    rate,
    ratio,
    total,
)

# histogram -> title, what it is
_LATENCIES = {
    "time_to_first_token": ("Time to first token", "From arrival to the first token."),
    "inter_token_latency": (
        "Inter-token latency",
        "Per token after the first step's; the gap of a step that emits 4 tokens counts as 4 quarters.",
    ),
    "time_per_output_token": ("Time per output token", "Mean of each request, first token excluded."),
    "e2e_latency": ("End-to-end latency", "From arrival to the last token."),
}
_FAILED = 'grpc_code!~"OK|CANCELLED"'
_USAGE: Steps = {0.8: "yellow", 0.95: "red"}


def serving() -> Dashboard:
    """The first place to look when clients complain."""
    rows = {
        "Now": _summary(),
        "Latency": _latency(),
        "Load": _load(),
        "Requests": _requests(),
        "Steps": _steps(),
    }
    return assemble("Serving", "Latency, load, cache, errors and steps of the servers.", rows)


def _summary() -> list[PanelBuilder]:
    failed = ratio(f"({grpc_rate('handled_total', _FAILED)} or vector(0))", grpc_rate("handled_total"))
    return [
        number("Requests", "Ended per second (requests_total).", "reqps", rate("requests_total"), width=3),
        number(
            "Output",
            "Tokens per second (generation_tokens_total).",
            "cps",
            rate("generation_tokens_total"),
            width=3,
        ),
        number(
            "TTFT p95",
            "95 of 100 first tokens came within this time (time_to_first_token).",
            "s",
            quantile(0.95, "time_to_first_token"),
            width=3,
            thresholds={1: "yellow", 2.5: "red"},
        ),
        number(
            "Inter-token p95",
            "95 of 100 tokens came within this time of the one before (inter_token_latency).",
            "s",
            quantile(0.95, "inter_token_latency"),
            width=3,
            thresholds={0.1: "yellow", 0.2: "red"},
        ),
        number(
            "Running",
            "Requests that own a row and blocks (requests_running).",
            "none",
            total(gauge("requests_running")),
            width=3,
        ),
        number(
            "Waiting",
            "Requests in the queue (requests_waiting).",
            "none",
            total(gauge("requests_waiting")),
            width=3,
            thresholds={1: "yellow", 20: "red"},
        ),
        number(
            "KV usage",
            "The fullest server's share of KV blocks that live requests hold (kv_cache_usage_ratio).",
            "percentunit",
            f"max({gauge('kv_cache_usage_ratio')})",
            width=3,
            thresholds=_USAGE,
        ),
        number(
            "Failed calls",
            "Share of gRPC calls that ended neither OK nor CANCELLED, of all models (grpc_server_handled_total).",
            "percentunit",
            failed,
            width=3,
            thresholds={0.01: "yellow", 0.05: "red"},
        ),
    ]


def _latency() -> list[PanelBuilder]:
    panels: list[PanelBuilder] = []
    for histogram, (title, text) in _LATENCIES.items():
        panels.append(_quantiles(histogram, title, text))
        panels.append(
            distribution(
                f"{title}, distribution",
                f"{text} Observations by bucket ({histogram}).",
                "s",
                buckets(histogram),
            )
        )
    panels.append(
        _quantiles(
            "queue_time",
            "Queue time",
            "From arrival to the first step that computes the request, and what the server expects of a new one until "
            "its first token (estimated_time_to_first_token).",
            more=[Query(f"max({gauge('estimated_time_to_first_token')})", "expected for a new request")],
        )
    )
    panels.append(
        _quantiles(
            "inter_message_latency",
            "Inter-message latency",
            "Between two messages with tokens of one stream: what a client's reader sees.",
        )
    )
    return panels


def _quantiles(
    histogram: str, title: str, text: str, unit: str = "s", *, more: Sequence[Query] = ()
) -> PanelBuilder:
    queries = [Query(quantile(share, histogram), f"p{share * 100:.0f}") for share in QUANTILES]
    return graph(title, f"{text} ({histogram})", unit, [*queries, Query(mean(histogram), "mean"), *more])


def _load() -> list[PanelBuilder]:
    cached = ratio(rate("prompt_tokens_cached_total"), rate("prompt_tokens_total"))
    return [
        graph(
            "Running and waiting requests",
            "Waiting above 0 for long: add servers, or room (requests_running, requests_waiting).",
            "none",
            [
                Query(total(gauge("requests_running")), "running"),
                Query(total(gauge("requests_waiting")), "waiting"),
            ],
        ),
        graph(
            "Tokens",
            "Prompt tokens (prefix hits included) and output tokens per second.",
            "cps",
            [
                Query(rate("prompt_tokens_total"), "prompt"),
                Query(rate("prompt_tokens_cached_total"), "of these from the prefix cache"),
                Query(rate("generation_tokens_total"), "output"),
            ],
        ),
        graph(
            "KV usage by server",
            "Share of KV blocks held; near 1, requests wait or are preempted (kv_cache_usage_ratio).",
            "percentunit",
            [Query(gauge("kv_cache_usage_ratio"), "{{instance}}")],
            is_share=True,
            thresholds=_USAGE,
            width=8,
        ),
        graph(
            "KV blocks",
            "Free, used, and cached: free, but findable by a prefix (kv_blocks).",
            "none",
            [Query(total(gauge("kv_blocks"), ("state",)), "{{state}}")],
            stacked=True,
            width=8,
        ),
        graph(
            "Prefix hits",
            "Share of prompt tokens found in the prefix cache (prompt_tokens_cached_total / prompt_tokens_total).",
            "percentunit",
            [Query(cached, "hits")],
            is_share=True,
            width=8,
        ),
    ]


def _requests() -> list[PanelBuilder]:
    return [
        graph(
            "Ended by finish reason",
            "Choices per second (requests_total).",
            "reqps",
            [Query(rate("requests_total", by=("finish_reason",)), "{{finish_reason}}")],
            stacked=True,
            width=8,
        ),
        graph(
            "Errors by status",
            "gRPC calls per second that did not end OK, of all models (grpc_server_handled_total).",
            "reqps",
            [Query(grpc_rate("handled_total", 'grpc_code!="OK"', by=("grpc_code",)), "{{grpc_code}}")],
            stacked=True,
            width=8,
        ),
        graph(
            "Refused by reason",
            "Requests per second refused before the engine, and those ended because the client did not read "
            "(requests_rejected_total, slow_readers_total).",
            "reqps",
            [
                Query(rate("requests_rejected_total", by=("reason",)), "{{reason}}"),
                Query(rate("slow_readers_total"), "slow reader"),
            ],
            stacked=True,
            width=8,
        ),
        _quantiles("request_prompt_tokens", "Prompt length", "Tokens of a request's prompt.", "none"),
        _quantiles("request_generation_tokens", "Output length", "Tokens emitted by a request.", "none"),
    ]


def _steps() -> list[PanelBuilder]:
    return [
        graph(
            "Step time by phase",
            "Mean seconds of a step's phases (step_time).",
            "s",
            [Query(mean("step_time", by=("phase",)), "{{phase}}")],
            stacked=True,
        ),
        distribution(
            "Tokens of a step",
            "Prompt tokens, new tokens and drafts that steps computed (step_tokens).",
            "none",
            buckets("step_tokens"),
        ),
        graph(
            "CUDA graphs replayed, and eager passes",
            "Forward passes per second by how they ran: full (one graph) or eager; eager are all on a CPU, and those "
            "that compute prompts (graph_replays_total).",
            "ops",
            [Query(rate("graph_replays_total", by=("stage", "kind")), "{{stage}} {{kind}}")],
            stacked=True,
        ),
        graph(
            "Padding of graphs",
            "Tokens per second that graphs computed for nobody, as they were larger than the step "
            "(graph_padding_rows_total).",
            "ops",
            [Query(rate("graph_padding_rows_total"), "padding")],
        ),
        graph(
            "Preemptions",
            "Requests per second whose blocks were freed, to be computed again (preemptions_total).",
            "ops",
            [Query(rate("preemptions_total"), "preemptions")],
            thresholds={0.1: "yellow", 1: "red"},
        ),
        graph(
            "Steps",
            "Steps per second that computed tokens (step_tokens).",
            "ops",
            [Query(rate("step_tokens_count"), "steps")],
        ),
    ]
