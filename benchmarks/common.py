"""What the benchmarks share: the command line, pairs measured in turn, prompts.

Result files have the schema of server/bench/schema.py. A benchmark reports; it never judges.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import statistics
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.stats import SpecObservation
from server.bench.environment import current_environment
from server.bench.schema import BenchResult, Comparison, Environment, SpeculationReport, write_result
from server.bench.statistics import speculation_reports
from server.choice import SpeculationTotals
from tools.fetch_model import resolve
from tools.server_process import exit_on_sigterm

RESULTS = Path(__file__).parent / "results"
MIN_PAIRS = 7


def run_in_turn(commands: Mapping[str, Sequence[str]], succeeds: Callable[[Sequence[str]], bool]) -> int:
    """By name, each in a process of its own, that `succeeds` runs. The exit status: 1 when one failed; the others run
    all the same."""
    failed = []
    for name, command in commands.items():
        print(f"== {shlex.join(command)}", flush=True)
        if not succeeds(command):
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


@dataclass(frozen=True)
class Options:
    """The command line that every benchmark has."""

    name: str
    quick: bool
    model: str
    num_pairs: int
    num_threads: int
    device: str
    seed: int
    output: Path

    def environment(self) -> Environment:
        return current_environment(device=self.device, num_threads=self.num_threads)

    def write(self, result: BenchResult) -> None:
        write_result(result, self.output)
        for comparison in result.comparisons:
            print(describe(comparison))
        for case, reports in result.speculation.items():
            for report in reports:
                print(f"{case}: {describe_speculation(report)}")
        for series in result.series:
            print(f"{series.name}: {series.y[0]:.6g} {series.unit} at first, {series.y[-1]:.6g} at the end")
        print(f"wrote {self.output}")


def option_parser(
    name: str, description: str | None, default_model: str = "smollm2"
) -> argparse.ArgumentParser:
    """The options of every benchmark; one that has more adds them. A known model is fetched when it is missing."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and cases; still at least 7 pairs")
    parser.add_argument(
        "--model", default=default_model, help="a known model or a GGUF file; default: %(default)s"
    )
    parser.add_argument(
        "--pairs", type=int, default=MIN_PAIRS, help="A B pairs, at least 7; default: %(default)s"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    return parser


def read_options(parser: argparse.ArgumentParser, name: str, arguments: argparse.Namespace) -> Options:
    """What `arguments`, parsed by `parser`, say of the common options."""
    if arguments.pairs < MIN_PAIRS:
        parser.error(f"--pairs: got {arguments.pairs}, expected at least {MIN_PAIRS}")
    return Options(
        name=name,
        quick=arguments.quick,
        model=resolve(arguments.model),
        num_pairs=arguments.pairs,
        num_threads=arguments.threads,
        device=arguments.device,
        seed=arguments.seed,
        output=arguments.output,
    )


async def interleave(
    num_pairs: int, a: Callable[[int], Awaitable[float]], b: Callable[[int], Awaitable[float]]
) -> tuple[list[float], list[float]]:
    """Measure A B A B ..., after one unmeasured pair; each call gets the index of its pair."""
    values_a: list[float] = []
    values_b: list[float] = []
    for pair in range(-1, num_pairs):
        value_a, value_b = await a(pair), await b(pair)
        if pair >= 0:
            values_a.append(value_a)
            values_b.append(value_b)
    return values_a, values_b


def compare(name: str, unit: str, a: str, b: str, values: tuple[list[float], list[float]]) -> Comparison:
    """Medians of both, and median and range of the ratios by pair."""
    values_a, values_b = values
    ratios = [value_b / value_a for value_a, value_b in zip(values_a, values_b, strict=True)]
    return Comparison(
        name=name,
        unit=unit,
        a=a,
        b=b,
        values_a=values_a,
        values_b=values_b,
        median_a=statistics.median(values_a),
        median_b=statistics.median(values_b),
        ratio_median=statistics.median(ratios),
        ratio_range=(min(ratios), max(ratios)),
    )


def describe(comparison: Comparison) -> str:
    """One line for people."""
    low, high = comparison.ratio_range
    return (
        f"{comparison.name}: {comparison.a} {comparison.median_a:.4g}, "
        f"{comparison.b} {comparison.median_b:.4g} {comparison.unit}; "
        f"ratio {comparison.ratio_median:.3f} ({low:.3f} to {high:.3f}), "
        f"{len(comparison.values_a)} pairs"
    )


def speculation_by_method(observations: Iterable[SpecObservation]) -> list[SpeculationReport]:
    """Acceptance length and rates of the verifications of any number of requests."""
    totals: dict[str, SpeculationTotals] = {}
    for observation in observations:
        totals.setdefault(observation.method, SpeculationTotals()).add(observation)
    return speculation_reports([total.to_proto() for total in totals.values()])


def describe_speculation(report: SpeculationReport) -> str:
    """One line for people."""
    rates = " ".join(f"{rate:.2f}" for rate in report.acceptance_rate_by_position)
    return (
        f"{report.method}, acceptance length {report.acceptance_length:.2f} in {report.verifications} verifications; "
        f"accepted by position {rates}"
    )


def random_prompt(length: int, vocab_size: int, *seed: int) -> list[int]:
    """Random token ids; another seed, another prompt."""
    ids: list[int] = np.random.default_rng(seed).integers(0, vocab_size, size=length).tolist()
    return ids


def run(
    benchmark: Callable[[Options], Coroutine[Any, Any, BenchResult]], name: str, description: str | None
) -> None:
    """The main function of a benchmark without options of its own."""
    parser = option_parser(name, description)
    options = read_options(parser, name, parser.parse_args())
    run_and_write(options, benchmark(options))


def run_and_write(options: Options, benchmark: Coroutine[Any, Any, BenchResult]) -> None:
    """Run it to its end and write its result."""
    exit_on_sigterm()
    options.write(asyncio.run(benchmark))
