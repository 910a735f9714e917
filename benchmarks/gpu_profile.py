"""Where a decode step's time goes on a GPU: host time by phase, device time by kernel, and how busy the device is.

python -m benchmarks.gpu_profile [--geometry smollm2-135m] [--speculator none] [--batch 1 64] [--prefill 4096]

50 steps under torch's profiler, which itself costs host time: the phases are of 50 other steps without it. A kernel's
time counts from the end of those before it, as it may be on the device before it may begin.
`--prefill N`: also the step that computes a prompt of N tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.geometries import GEOMETRIES
from benchmarks.gpu_engine import METHODS, Setup, add_requests, capture_asked, make_core, run_batch
from engine.config import CudaGraphsName, DummyWeightsName, NumericsName
from engine.core import EngineCore

NUM_FIRST_STEPS, NUM_STEPS = 20, 50
PROMPT_LEN = 128
NUM_KERNELS_SHOWN = 14


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="smollm2-135m", choices=list(GEOMETRIES))
    parser.add_argument("--speculator", default="none", choices=METHODS)
    parser.add_argument("--k", type=int, default=4, help="drafts of a step")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prefill", type=int, metavar="TOKENS")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--graphs", default="auto", choices=get_args(CudaGraphsName))
    parser.add_argument("--numerics", default="auto", choices=get_args(NumericsName))
    parser.add_argument("--weights", default="uniform", choices=get_args(DummyWeightsName))
    arguments = parser.parse_args()
    num_drafts = 0 if arguments.speculator == "none" else arguments.k
    core = make_core(
        Setup(
            arguments.geometry,
            arguments.speculator,
            num_drafts,
            backend=arguments.backend,
            graphs=arguments.graphs,
            numerics=arguments.numerics,
            weights=arguments.weights,
        )
    )
    for batch in arguments.batch:
        print(
            f"== {arguments.geometry}, speculator {arguments.speculator}, batch {batch}, {arguments.graphs}"
        )
        _show_decodes(core, batch, 1 + num_drafts)
    if arguments.prefill:
        print(f"== {arguments.geometry}, a prompt of {arguments.prefill} tokens")
        _show_prefill(core, arguments.prefill)
    core.close()


def _show_decodes(core: EngineCore, batch: int, tokens_per_step: int) -> None:
    run_batch(core, batch, seed=1, prompt_len=PROMPT_LEN, output_len=32)  # asks for its graphs
    capture_asked(core)
    # As long as every step may take k + 1 tokens.
    num_tokens = tokens_per_step * (NUM_FIRST_STEPS + 2 * NUM_STEPS + 10)
    add_requests(core, batch, seed=0, prompt_len=PROMPT_LEN, output_len=num_tokens)
    for _ in range(NUM_FIRST_STEPS):  # prefill, and everything is compiled
        core.step()
    _show_phases(core)
    _show_kernels(core.step, NUM_STEPS)
    while core.has_work:
        core.step()


def _show_prefill(core: EngineCore, num_tokens: int) -> None:
    def run(seed: int) -> None:
        run_batch(core, 1, seed=seed, prompt_len=num_tokens, output_len=1)

    run(1)
    _show_kernels(lambda: run(2), 1)


def _show_phases(core: EngineCore) -> None:
    phases: defaultdict[str, list[float]] = defaultdict(list)
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        message = core.step()
        assert message is not None
        assert message.step is not None
        for phase, seconds in message.step.phase_seconds.items():
            phases[phase].append(seconds)
    step_ms = (time.perf_counter() - started) / NUM_STEPS * 1e3
    medians = ", ".join(f"{name} {statistics.median(values) * 1e3:.3f}" for name, values in phases.items())
    print(f"step {step_ms:.3f} ms; host ms by phase: {medians}")


def _show_kernels(step: Callable[[], object], num_steps: int) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    own = own_times(spans)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for event, us in zip(events, own, strict=True):
        times[event.name].append(us)
    first, last = spans[0][0], max(end for _, end in spans)
    busy = sum(own)
    print(
        f"device busy {busy / (last - first):.1%} of the time under the profiler; "
        f"{len(events) / num_steps:.0f} launches and {busy / num_steps / 1e3:.3f} ms a step"
    )
    for name, values in sorted(times.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS_SHOWN]:
        print(
            f"  {sum(values) / num_steps / 1e3:7.3f} ms a step  {len(values) / num_steps:6.1f} x "
            f"{statistics.median(values):7.2f} us  {name[:90]}"
        )


def own_times(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Of kernels in the order of their starts, (start, end): how long each ran after all before it had ended. One that
    begins early (engine/kernels/dependent_launch.py) waits until then; the sum is the time in which anything ran."""
    own, latest = [], float("-inf")
    for start, end in spans:
        own.append(max(end - max(start, latest), 0.0))
        latest = max(latest, end)
    return own


if __name__ == "__main__":
    main()
