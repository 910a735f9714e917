"""How long an engine takes to be ready on a GPU, with nothing compiled and with everything compiled.

python -m benchmarks.gpu_startup [--geometry smollm2-135m llama-3.1-8b gemma-4-e4b] [--runs 3] [--output FILE]

Each start is a process of its own, with dummy weights. The first one of a geometry finds an empty Triton cache; the
others find what it left. `process_seconds` count from the process's start, imports included; `engine_seconds` are the
engine's own. `first_token_seconds` are those of the first request, of 128 tokens, once the engine is ready. `--profile`
starts one in this process and prints where the host's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.geometries import GEOMETRIES

READY = "ready: "  # begins the line of a child that tells its times
NUM_FUNCTIONS_SHOWN = 25


def start_once(geometry: str, device: str, num_layers: int | None, is_profiled: bool) -> None:
    """In a child: start an engine, tell the times."""
    from benchmarks.gpu_engine import Setup, make_core, run_batch

    setup = Setup(geometry, device=device, num_layers=num_layers)
    profiler = cProfile.Profile()
    started = time.perf_counter()
    if is_profiled:
        profiler.enable()
    core = make_core(setup)
    profiler.disable()
    ready = time.perf_counter()
    times = {"engine_seconds": ready - started}
    run_batch(core, 1, seed=0, prompt_len=128, output_len=1)
    times["first_token_seconds"] = time.perf_counter() - ready
    times |= {f"{name}_seconds": value for name, value in core.model_info.startup_seconds.items()}
    print(READY + json.dumps(times), flush=True)
    if is_profiled:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(NUM_FUNCTIONS_SHOWN)
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(NUM_FUNCTIONS_SHOWN)


def start_in_process(geometry: str, cache: Path, device: str, num_layers: int | None) -> dict[str, float]:
    """The times of a start. Raises RuntimeError when there was none."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.gpu_startup",
        "--once",
        "--geometry",
        geometry,
        "--device",
        device,
    ]
    words += [] if num_layers is None else ["--num-layers", str(num_layers)]
    started = time.perf_counter()
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "TRITON_CACHE_DIR": str(cache)}
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(READY):
                seconds = time.perf_counter() - started
                times: dict[str, float] = json.loads(line.removeprefix(READY))
                return {"process_seconds": seconds - times["first_token_seconds"], **times}
    raise RuntimeError(f"{geometry}: the engine ended with status {child.returncode}, expected it to start")


def measure(geometry: str, num_runs: int, device: str, num_layers: int | None) -> list[dict[str, Any]]:
    """One row with a cold cache, one of several starts with a warm one: medians, and the spread of all."""
    with tempfile.TemporaryDirectory() as name:
        cold, *warm = [
            start_in_process(geometry, Path(name), device, num_layers) for _ in range(1 + num_runs)
        ]
    rows: list[dict[str, Any]] = [{"geometry": geometry, "triton_cache": "cold", "runs": 1, **cold}]
    if warm:
        medians = {name: statistics.median(times[name] for times in warm) for name in warm[0]}
        totals = [times["process_seconds"] for times in warm]
        rows.append(
            {
                "geometry": geometry,
                "triton_cache": "warm",
                "runs": num_runs,
                **medians,
                "spread": max(totals) / min(totals) - 1,
            }
        )
    return rows


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--geometry",
        nargs="+",
        default=["smollm2-135m", "llama-3.1-8b", "gemma-4-e4b"],
        choices=list(GEOMETRIES),
    )
    parser.add_argument("--runs", type=int, default=3, help="starts with a warm cache")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--num-layers", type=int, help="fewer than the geometry has: a rehearsal")
    parser.add_argument("--once", action="store_true", help="start in this process, tell the times")
    parser.add_argument("--profile", action="store_true", help="start in this process, under a profiler")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    if arguments.once or arguments.profile:
        for geometry in arguments.geometry:
            start_once(geometry, arguments.device, arguments.num_layers, arguments.profile)
        return

    from benchmarks.gpu_engine import write_report

    rows: list[dict[str, Any]] = []
    for geometry in arguments.geometry:
        for row in measure(geometry, arguments.runs, arguments.device, arguments.num_layers):
            rows.append(row)
            print(json.dumps(row), flush=True)
        if arguments.output:
            write_report("gpu_startup", arguments.output, rows, arguments.device)


if __name__ == "__main__":
    main()
