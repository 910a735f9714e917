"""Time per output token of the engine itself on a GPU: dummy weights of a stated geometry, random prompts, greedy.

python -m benchmarks.gpu_steps [--geometry llama-3.1-8b] [--speculator none eagle3] [--batch 1 8 64 256] [--output FILE]

128 tokens in, 256 out, end tokens ignored, prefix cache off: the peer's settings. Three runs of each row; medians over
requests of the time per output token and of the time between two outputs (a step) are printed with the spread over the
runs. Graphs that the runs ask for are captured before them. Drafters have dummy weights too, and acceptance is
synthetic: the first two drafts of a step are accepted, so with k = 4 it yields three tokens; only step times compare.
The weights are the peer's too, uniform within 0.001. With `--weights normal`, spread like a trained model's, steps of
many rows take longer: the device lowers its clock (`nvidia-smi --query-gpu=clocks.sm,power.draw` meanwhile).
`--prefill N` also measures one request of N prompt tokens and one output token, without drafts.

A configuration that fails is a row with an error, and the others go on; rows are written as they come. A rehearsal of
every code path without a GPU: `--device cpu --num-layers 2 --geometry smollm2-135m --output-tokens 8`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from benchmarks.floor import floor_ms
from benchmarks.geometries import GEOMETRIES
from benchmarks.gpu_engine import (
    METHODS,
    NUM_ACCEPTED,
    Setup,
    add_requests,
    capture_asked,
    free_memory,
    run_batch,
    start,
    write_report,
)
from engine.config import CudaGraphsName, DummyWeightsName, NumericsName
from engine.core import EngineCore

NUM_WARM_UP_TOKENS = 32  # of output, in the run that asks for graphs

Row = dict[str, Any]
Emit = Callable[[Row], None]


@dataclass(frozen=True)
class Work:
    """What is measured of each setup."""

    batches: tuple[int, ...]
    prompt_len: int
    output_len: int
    num_runs: int
    prefill_len: int | None
    deadline: float  # time.monotonic(); nothing else is begun after it

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline


def measure(setup: Setup, work: Work, emit: Emit) -> None:
    """A row for every batch size and one for the long prompt."""
    core, start_seconds = start(setup)
    try:
        for batch in work.batches:
            if work.is_over:
                return
            emit(_measure_batch(core, setup, work, batch, start_seconds))
        if work.prefill_len and setup.speculator == "none" and not work.is_over:
            emit(_measure_prefill(core, setup, work.prefill_len, work.num_runs, start_seconds))
    finally:
        core.close()


def _measure_batch(core: EngineCore, setup: Setup, work: Work, batch: int, start_seconds: float) -> Row:
    lengths = {"prompt_len": work.prompt_len, "output_len": work.output_len}
    warm_up = min(NUM_WARM_UP_TOKENS, work.output_len)
    run_batch(core, batch, seed=10_000 + batch, prompt_len=work.prompt_len, output_len=warm_up)
    captures_ms = capture_asked(core)
    runs = [run_batch(core, batch, seed=100 * batch + index, **lengths) for index in range(work.num_runs)]
    tpots = [run.tpot_ms(work.output_len) for run in runs]
    row = {
        **setup.describe(),
        "batch": batch,
        "prompt_tokens": work.prompt_len,
        "output_tokens": work.output_len,
        "runs": work.num_runs,
        "tpot_ms": statistics.median(tpots),
        "step_ms": statistics.median(run.step_ms() for run in runs),
        "spread": max(tpots) / min(tpots) - 1,
        "replayed_share": min(run.replayed_share for run in runs),
        "capture_ms": max(captures_ms, default=None),
        "start_seconds": start_seconds,
    }
    if setup.num_layers is None:
        row["floor_ms"] = floor_ms(setup.geometry, batch, setup.speculator, setup.num_drafts)
        row["step_over_floor"] = row["step_ms"] / row["floor_ms"]
    if setup.speculator != "none":
        row["acceptance"] = f"synthetic: {min(NUM_ACCEPTED, setup.num_drafts)} drafts of a step"
        row["acceptance_length"] = min(run.acceptance_length(setup.speculator) for run in runs)
    return row


def _measure_prefill(
    core: EngineCore, setup: Setup, prompt_len: int, num_runs: int, start_seconds: float
) -> Row:
    times = []
    for seed in range(1 + num_runs):  # the first is not counted, and asks for a graph where chunks have them
        if seed == 1:
            capture_asked(core)
        add_requests(core, 1, seed, prompt_len=prompt_len, output_len=1)
        started = time.perf_counter()
        while core.has_work:
            core.step()
        times.append(time.perf_counter() - started)
    return {
        **setup.describe(),
        "prompt_tokens": prompt_len,
        "runs": num_runs,
        "prefill_ms": statistics.median(times[1:]) * 1e3,
        "spread": max(times[1:]) / min(times[1:]) - 1,
        "start_seconds": start_seconds,
    }


def measure_all(setups: list[Setup], work: Work, emit: Emit) -> None:
    for setup in setups:
        if work.is_over:
            print(f"no time is left for {setup.describe()}", flush=True)
            continue
        try:
            measure(setup, work, emit)
        except Exception as error:  # whatever it is: the other configurations are worth their own attempt
            traceback.print_exc()
            emit({**setup.describe(), "error": f"{type(error).__name__}: {error}"[:300]})
        free_memory()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--speculator", nargs="+", default=["none"], choices=METHODS)
    parser.add_argument("--k", nargs="+", type=int, default=[4], help="drafts of a step")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--prefill", type=int, metavar="TOKENS")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--graphs", nargs="+", default=["auto"], choices=get_args(CudaGraphsName))
    parser.add_argument("--numerics", nargs="+", default=["auto"], choices=get_args(NumericsName))
    parser.add_argument("--weights", nargs="+", default=["uniform"], choices=get_args(DummyWeightsName))
    parser.add_argument("--num-layers", type=int, help="fewer than the geometry has: a rehearsal")
    parser.add_argument("--kv-cache-bytes", type=int, help="default: the engine's share of the memory")
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="nothing is begun after it"
    )
    parser.add_argument("--output", type=Path)
    return parser


def setups_of(arguments: argparse.Namespace) -> list[Setup]:
    combinations = itertools.product(
        arguments.geometry,
        arguments.speculator,
        arguments.k,
        arguments.graphs,
        arguments.numerics,
        arguments.weights,
    )
    wanted = [
        Setup(
            geometry=geometry,
            speculator=speculator,
            num_drafts=0 if speculator == "none" else num_drafts,
            device=arguments.device,
            backend=arguments.backend,
            graphs=graphs,
            numerics=numerics,
            weights=weights,
            num_layers=arguments.num_layers,
            kv_cache_bytes=arguments.kv_cache_bytes,
        )
        for geometry, speculator, num_drafts, graphs, numerics, weights in combinations
    ]
    return list(dict.fromkeys(setup for setup in wanted if setup.is_possible))


def main(words: list[str] | None = None) -> None:
    arguments = make_parser().parse_args(words)
    rows: list[Row] = []

    def emit(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.output:
            write_report("gpu_steps", arguments.output, rows, arguments.device)

    work = Work(
        batches=tuple(arguments.batch),
        prompt_len=arguments.prompt_tokens,
        output_len=arguments.output_tokens,
        num_runs=arguments.runs,
        prefill_len=arguments.prefill,
        deadline=time.monotonic() + arguments.time_limit,
    )
    measure_all(setups_of(arguments), work, emit)


if __name__ == "__main__":
    main()
