"""What a benchmark result is: schema `slipstream.bench/1`, one JSON file per run.

`slipstream bench` and everything under benchmarks/ write this and nothing else, so that results can be
compared. Times are seconds unless a field name says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a result was made."""

    command: str
    time: str  # ISO 8601, UTC
    python: str
    platform: str
    cpu: str
    num_cpus: int  # that this process may use
    git_revision: str  # with "+" when the tree had changes; empty outside a checkout
    versions: dict[str, str]  # package -> version, of those installed
    device: str = ""  # of the engine, where it is known
    num_threads: int | None = None  # of the engine, where it was set


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution. All zero when nothing was observed."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True):
    """One draft method over all requests of a run."""

    method: str
    is_synthetic: bool = False  # drafts were accepted at given rates, whatever the model said
    verifications: int  # those that had drafts
    draft_tokens: int
    accepted_tokens: int
    acceptance_length: float  # tokens emitted per verification, includes the +1
    acceptance_rate_by_position: list[float]  # accepted / offered at each draft position


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the load generator against one server."""

    model: str
    synthetic_acceptance: list[float] = []  # the server's rates by position; empty: the text is the model's
    duration: float  # first send to last answer
    num_requests: int
    num_completed: int
    errors: dict[str, int]  # gRPC status name -> requests
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_messages: int  # streamed messages that carried tokens
    requests_per_second: float
    tokens_per_second: float  # completion tokens
    messages_per_second: float
    time_to_first_token: Summary
    inter_token_latency: Summary  # per token; the gap before a message is shared among its tokens
    inter_message_latency: Summary
    time_per_output_token: Summary  # per request: mean after the first token
    e2e_latency: Summary
    speculation: list[SpeculationReport]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two variants measured in turn, A B A B ..., so that drift of the machine falls on both."""

    name: str
    unit: str
    a: str
    b: str
    values_a: list[float]
    values_b: list[float]
    median_a: float
    median_b: float
    ratio_median: float  # of b / a by pair
    ratio_range: tuple[float, float]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A value watched over the course of a run."""

    name: str
    unit: str
    x_name: str
    x: list[float]
    y: list[float]


class BenchResult(msgspec.Struct, kw_only=True):
    """One result file. Fields that a benchmark has no use for stay empty."""

    schema: Literal["slipstream.bench/1"] = "slipstream.bench/1"
    benchmark: str
    environment: Environment
    seed: int
    parameters: dict[str, str | int | float | bool | None] = {}
    loads: dict[str, LoadReport] = {}
    speculation: dict[str, list[SpeculationReport]] = {}  # case -> by draft method
    comparisons: list[Comparison] = []
    series: list[Series] = []
    rows: list[dict[str, str | int | float | None]] = []  # one measurement each; names end in their unit


def write_result(result: BenchResult, path: Path) -> None:
    """Write `result` as indented JSON, creating the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def read_result(path: Path) -> BenchResult:
    """Read a result file; msgspec.ValidationError when it is of another schema."""
    return msgspec.json.decode(path.read_bytes(), type=BenchResult)
