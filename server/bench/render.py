"""Shows a load report as tables on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from server.bench.schema import LoadReport, SpeculationReport, Summary


def print_report(report: LoadReport, console: Console) -> None:
    """Throughput, latencies, speculation, errors: in this order, empty parts left out. Every table of a server with
    synthetic acceptance says so."""
    if report.synthetic_acceptance:
        rates = ", ".join(f"{rate:g}" for rate in report.synthetic_acceptance)
        console.print(f"[yellow]synthetic: drafts were accepted at rates {rates}, not by the model[/yellow]")
    console.print(_throughput(report))
    if report.num_completed:
        console.print(_latencies(report))
    if report.speculation:
        console.print(_speculation(report.speculation))
    else:
        console.print("no speculation")
    for status, count in sorted(report.errors.items()):
        console.print(f"[red]{count} requests ended with {status}[/red]")


def _throughput(report: LoadReport) -> Table:
    title = f"{report.model}: {report.num_completed} of {report.num_requests} requests completed"
    table = Table(title=title + _mark(bool(report.synthetic_acceptance)))
    _add_columns(
        table, "seconds", "prompt tokens", "cached", "output tokens", "requests/s", "tokens/s", "messages/s"
    )
    table.add_row(
        f"{report.duration:.2f}",
        str(report.prompt_tokens),
        str(report.cached_tokens),
        str(report.completion_tokens),
        f"{report.requests_per_second:.2f}",
        f"{report.tokens_per_second:.1f}",
        f"{report.messages_per_second:.1f}",
    )
    return table


def _latencies(report: LoadReport) -> Table:
    rows: list[tuple[str, Summary]] = [
        ("time to first token", report.time_to_first_token),
        ("inter-token latency", report.inter_token_latency),
        ("inter-message latency", report.inter_message_latency),
        ("time per output token", report.time_per_output_token),
        ("end to end", report.e2e_latency),
    ]
    table = Table("milliseconds" + _mark(bool(report.synthetic_acceptance)))
    _add_columns(table, "mean", "p50", "p95", "p99", "max")
    for name, summary in rows:
        values = (summary.mean, summary.p50, summary.p95, summary.p99, summary.max)
        table.add_row(name, *(f"{value * 1e3:.2f}" for value in values))
    return table


def _speculation(reports: list[SpeculationReport]) -> Table:
    table = Table("draft method")
    _add_columns(table, "verifications", "drafted", "accepted", "acceptance length", "rate by position")
    for report in reports:
        table.add_row(
            report.method + _mark(report.is_synthetic),
            str(report.verifications),
            str(report.draft_tokens),
            str(report.accepted_tokens),
            f"{report.acceptance_length:.2f}",
            " ".join(f"{rate:.2f}" for rate in report.acceptance_rate_by_position),
        )
    return table


def _add_columns(table: Table, *titles: str) -> None:
    """A title of one word is never cut, however narrow the terminal; others break between words."""
    for title in titles:
        table.add_column(title, justify="right", no_wrap=" " not in title)


def _mark(is_synthetic: bool) -> str:
    return " (synthetic)" if is_synthetic else ""
