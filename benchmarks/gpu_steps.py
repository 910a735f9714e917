"""Time per output token of the engine itself on a GPU: dummy weights of a stated geometry, random prompts, greedy.

python -m benchmarks.gpu_steps [--geometry llama-3.1-8b] [--speculator none eagle3] [--batch 1 8 64] [--output FILE]

128 tokens in, 256 out, end tokens ignored, prefix cache off: the peer's settings. Three runs of each row; medians over
requests of the time per output token and of the time between two outputs (a step) are printed with the spread over the
runs. Graphs that the runs ask for are captured before them. Drafters have dummy weights too, and acceptance is
synthetic: the first two drafts of a step are accepted, so with k = 4 it yields three tokens; only step times compare.
`--prefill N` measures one request of N prompt tokens and one output token instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.floor import floor_ms
from benchmarks.geometries import DRAFTERS, GEOMETRIES
from engine.config import CudaGraphsName, engine_config
from engine.core import EngineCore
from engine.messages import AddRequest
from engine.params import SamplingParams
from server.bench.environment import current_environment
from server.bench.schema import BenchResult, write_result

PROMPT_LEN, OUTPUT_LEN, NUM_RUNS = 128, 256, 3
NUM_ACCEPTED = 2  # drafts of a step, at most
METHODS = ("none", "ngram", "eagle3", "gemma4_mtp", "mtp")


@dataclass(frozen=True)
class Setup:
    geometry: str
    speculator: str = "none"
    num_drafts: int = 0
    backend: str = "auto"
    graphs: str = "auto"

    @property
    def is_possible(self) -> bool:
        return self.speculator in ("none", "ngram") or (self.geometry, self.speculator) in DRAFTERS


def make_core(setup: Setup, folder: Path) -> EngineCore:
    config = {"torch_dtype": "bfloat16", "eos_token_id": 2, **GEOMETRIES[setup.geometry]}
    (folder / "config.json").write_text(json.dumps(config))
    return EngineCore(
        engine_config(
            model={"model": str(folder), "load_format": "dummy"},
            device="cuda",
            attention_backend=setup.backend,
            cuda_graphs=setup.graphs,
            scheduler={"max_num_seqs": 256, "max_num_batched_tokens": 16384, "max_prefill_stall": None},
            cache={"enable_prefix_cache": False},
            **_speculation(setup, folder),
        )
    )


def _speculation(setup: Setup, folder: Path) -> dict[str, Any]:
    if setup.speculator == "none":
        return {}
    speculator: dict[str, Any] = {"method": setup.speculator, "k": setup.num_drafts}
    drafter = DRAFTERS.get((setup.geometry, setup.speculator))
    if drafter is not None:
        (folder / "drafter").mkdir()
        (folder / "drafter" / "config.json").write_text(json.dumps(drafter))
        speculator["model"] = str(folder / "drafter")
    if setup.speculator == "ngram":
        speculator["options"] = {"min_n": "1"}
    return {
        "speculators": (speculator,),
        "draft_policy": "first",
        "allow_synthetic": True,
        "synthetic_acceptance": [float(index < NUM_ACCEPTED) for index in range(setup.num_drafts)],
    }


def add_requests(
    core: EngineCore, batch: int, seed: int, prompt_len: int = PROMPT_LEN, output_len: int = OUTPUT_LEN
) -> None:
    """Random prompts, other ones for every seed. They repeat themselves, so that prompt lookup finds something."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = torch.randint(3, 40000, (prompt_len // 2,), generator=generator).tolist() * 2
        core.handle(AddRequest(request_id=f"{seed}-{index}", prompt_token_ids=prompt, params=params))


@dataclass(frozen=True)
class RunTimes:
    """Medians over the requests, milliseconds."""

    tpot_ms: float
    step_ms: float


def run_batch(core: EngineCore, batch: int, seed: int) -> RunTimes:
    add_requests(core, batch, seed)
    times: dict[str, list[float]] = {}
    while core.has_work:
        message = core.step()
        now = time.perf_counter()
        for output in message.outputs if message else ():
            if output.token_ids:
                times.setdefault(output.request_id, []).append(now)
    return RunTimes(
        tpot_ms=statistics.median((t[-1] - t[0]) / (OUTPUT_LEN - 1) for t in times.values()) * 1e3,
        step_ms=statistics.median((t[-1] - t[0]) / (len(t) - 1) for t in times.values()) * 1e3,
    )


def capture_all(core: EngineCore) -> None:
    while core.prepare():
        pass


def start(setup: Setup) -> tuple[EngineCore, float]:
    """The engine, and the seconds that it took to be ready."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        core = make_core(setup, Path(folder))
        seconds = time.perf_counter() - started
    print(f"{setup}: ready after {seconds:.1f} s", flush=True)
    return core, seconds


def measure(setup: Setup, batches: list[int]) -> list[dict[str, Any]]:
    """One row a batch size."""
    core, start_seconds = start(setup)
    rows = []
    for batch in batches:
        run_batch(core, batch, seed=10_000 + batch)  # asks for its graphs
        capture_all(core)
        times = [run_batch(core, batch, seed=100 * batch + index) for index in range(NUM_RUNS)]
        tpots = [run.tpot_ms for run in times]
        row = {
            **asdict(setup),
            "batch": batch,
            "tpot_ms": statistics.median(tpots),
            "step_ms": statistics.median(run.step_ms for run in times),
            "spread": max(tpots) / min(tpots) - 1,
            "synthetic_acceptance_length": 1 + min(setup.num_drafts, NUM_ACCEPTED),
            "floor_ms": floor_ms(setup.geometry, batch, setup.speculator, setup.num_drafts),
            "start_seconds": start_seconds,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    _end(core)
    return rows


def measure_prefill(setup: Setup, prompt_len: int) -> dict[str, Any]:
    core, start_seconds = start(setup)
    times = []
    for seed in range(1 + 5):
        add_requests(core, 1, seed, prompt_len, output_len=1)
        started = time.perf_counter()
        while core.has_work:
            core.step()
        times.append(time.perf_counter() - started)
    row = {
        **asdict(setup),
        "prompt_tokens": prompt_len,
        "prefill_ms": statistics.median(times[1:]) * 1e3,
        "spread": max(times[1:]) / min(times[1:]) - 1,
        "start_seconds": start_seconds,
    }
    print(json.dumps(row), flush=True)
    _end(core)
    return row


def _end(core: EngineCore) -> None:
    core.close()
    del core
    torch.cuda.empty_cache()


def write_report(benchmark: str, path: Path, rows: list[dict[str, Any]]) -> None:
    environment = current_environment(device=torch.cuda.get_device_name(), num_threads=None)
    write_result(BenchResult(benchmark=benchmark, environment=environment, seed=0, rows=rows), path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--speculator", nargs="+", default=["none"], choices=METHODS)
    parser.add_argument("--k", nargs="+", type=int, default=[4], help="drafts of a step")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--prefill", type=int, metavar="TOKENS")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--graphs", nargs="+", default=["auto"], choices=get_args(CudaGraphsName))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for setup in setups(arguments):
        if arguments.prefill:
            rows.append(measure_prefill(setup, arguments.prefill))
        else:
            rows += measure(setup, arguments.batch)
        if arguments.output:
            write_report("gpu_steps", arguments.output, rows)


def setups(arguments: argparse.Namespace) -> list[Setup]:
    combinations = itertools.product(
        arguments.geometry, arguments.speculator, arguments.k, [arguments.backend], arguments.graphs
    )
    wanted = [
        replace(setup, num_drafts=0) if setup.speculator == "none" else setup
        for setup in (Setup(*values) for values in combinations)
        if setup.is_possible
    ]
    return list(dict.fromkeys(wanted))


if __name__ == "__main__":
    main()
