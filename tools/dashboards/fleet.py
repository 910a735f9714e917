"""The dashboard Fleet: one line per server, to find the one that differs."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import assemble
from tools.dashboards.panels import PanelBuilder, Query, comparison, graph, number
from tools.dashboards.queries import gauge, mean, quantile, rate, ratio, total

_BY_SERVER = ("instance",)
_UP = gauge("engine_up")
_RESTARTS = f"changes({gauge('engine_start_time_seconds')}[$__range])"
_FIRING = (
    'count(ALERTS{alertname=~"Slipstream.+", alertstate="firing", namespace=~"$namespace"}) or vector(0)'
)


def fleet() -> Dashboard:
    """Servers side by side."""
    rows = {"Now": [*_summary(), _servers()], "Server by server": _graphs()}
    return assemble("Fleet", "All servers side by side: which one differs.", rows)


def _summary() -> list[PanelBuilder]:
    return [
        number("Serving", "Servers whose engine serves (engine_up).", "none", total(_UP)),
        number(
            "Not serving",
            "Servers that answer but load, drain or have lost their engine (engine_up).",
            "none",
            f"count({_UP} == 0) or vector(0)",
            thresholds={1: "red"},
        ),
        number("Alerts", "Alerts of Slipstream that fire now.", "none", _FIRING, thresholds={1: "red"}),
        number(
            "Restarts",
            "Starts of engines beyond each server's first, in the time shown (engine_start_time_seconds).",
            "none",
            total(_RESTARTS),
            thresholds={1: "yellow", 3: "red"},
        ),
        number("Requests", "Ended per second (requests_total).", "reqps", rate("requests_total")),
        number(
            "Output", "Tokens per second (generation_tokens_total).", "cps", rate("generation_tokens_total")
        ),
    ]


def _servers() -> PanelBuilder:
    columns = {
        "Serving": (total(_UP, _BY_SERVER), "bool_yes_no"),
        "Running": (total(gauge("requests_running"), _BY_SERVER), "none"),
        "Waiting": (total(gauge("requests_waiting"), _BY_SERVER), "none"),
        "KV usage": (total(gauge("kv_cache_usage_ratio"), _BY_SERVER), "percentunit"),
        "Output tokens/s": (rate("generation_tokens_total", by=_BY_SERVER), "none"),
        "TTFT p95": (quantile(0.95, "time_to_first_token", by=_BY_SERVER), "s"),
        "Acceptance length": (mean("spec_decode_acceptance_length", by=_BY_SERVER), "none"),
        "Up since": (f"{total(gauge('engine_start_time_seconds'), _BY_SERVER)} * 1000", "dateTimeFromNow"),
    }
    return comparison("Servers", "One line per server, now.", "instance", columns)


def _graphs() -> list[PanelBuilder]:
    hits = ratio(
        rate("prompt_tokens_cached_total", by=_BY_SERVER), rate("prompt_tokens_total", by=_BY_SERVER)
    )
    return [
        _graph(
            "Running requests",
            "Even lines: the balancing works (requests_running).",
            "none",
            gauge("requests_running"),
        ),
        _graph(
            "Waiting requests", "Requests in the queue (requests_waiting).", "none", gauge("requests_waiting")
        ),
        _graph(
            "KV usage",
            "Share of KV blocks held (kv_cache_usage_ratio).",
            "percentunit",
            gauge("kv_cache_usage_ratio"),
        ),
        _graph(
            "Output",
            "Tokens per second (generation_tokens_total).",
            "cps",
            rate("generation_tokens_total", by=_BY_SERVER),
        ),
        _graph(
            "TTFT p95",
            "95 of 100 first tokens came within this time (time_to_first_token).",
            "s",
            quantile(0.95, "time_to_first_token", by=_BY_SERVER),
        ),
        _graph(
            "Inter-token p95",
            "95 of 100 tokens came within this time of the one before (inter_token_latency).",
            "s",
            quantile(0.95, "inter_token_latency", by=_BY_SERVER),
        ),
        _graph(
            "Acceptance length",
            "Tokens emitted per verification that had drafts (spec_decode_acceptance_length).",
            "none",
            mean("spec_decode_acceptance_length", by=_BY_SERVER),
        ),
        _graph(
            "Prefix hits",
            "Share of prompt tokens found in the prefix cache; low where one prefix is spread over servers.",
            "percentunit",
            hits,
        ),
        graph(
            "Start of servers",
            "Seconds of each phase of the start (startup_seconds).",
            "s",
            [Query(gauge("startup_seconds"), "{{instance}} {{phase}}")],
            width=8,
        ),
    ]


def _graph(title: str, description: str, unit: str, expression: str) -> PanelBuilder:
    return graph(title, description, unit, [Query(expression, "{{instance}}")], width=8)
