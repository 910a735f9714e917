"""Host time of a decode step: what the engine costs beside the device, by batch.

python -m benchmarks.host_cost [--batch 64 256] [--runs 5]

The core and the scheduler are the real ones, and so are the shapes and inputs of step graphs and the reading of
results (`worker_ms`); the device is one that answers at once. What copies and launches cost on a GPU comes on top.
`schedule_ms` makes the plan, `output_ms` is from results to outputs. Prompts differ in length, so that requests need
their blocks in different steps. A run is the median of its steps with the whole batch. Of the runs the fastest counts:
a shared machine only ever makes them slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from engine.assembly import EngineParts, assemble
from engine.batch.input_batch import BatchLayout
from engine.config import EngineConfig, engine_config
from engine.core import EngineCore
from engine.cudagraph import CaptureQueue
from engine.executor import Executor, StepHandle
from engine.garbage import spare_what_is_loaded
from engine.kernels.pack_results import NUM_COUNTS
from engine.messages import AddRequest
from engine.models.loader import load_model
from engine.params import SamplingParams
from engine.request import NO_METHOD
from engine.sampling.states import SamplingStates
from engine.step import HostInputs, RowResult, StepOutput, StepPlan
from engine.worker.output import PendingOutput, StepTensors
from engine.worker.step_graphs import StepDescriptor, StepGraphs, StepLimits

PROMPT_LEN, OUTPUT_LEN = 128, 64
MAX_MODEL_LEN, VOCAB_SIZE = 4096, 512
BLOCK_SIZE = 16
CPU = torch.device("cpu")
GEOMETRY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}


class InstantDevice(Executor):
    """Every request gets token 7. `seconds`: what the worker's side costs the host, by decode step."""

    def __init__(self, max_num_seqs: int) -> None:
        self._states = SamplingStates(max_num_seqs + 1, VOCAB_SIZE, CPU)
        self._results = torch.full((max_num_seqs, NUM_COUNTS + 1), 7)
        self._results[:, :NUM_COUNTS] = torch.tensor([1, 0, 0, 0, 0, 0])  # one token each, no drafts
        limits = StepLimits(
            num_reqs=max_num_seqs, max_seq_len=MAX_MODEL_LEN, num_drafts={}, verified_drafts=0
        )
        captures = CaptureQueue(lambda run: run)
        self._graphs = StepGraphs(
            self._run_step, limits=limits, states=self._states, needs={}, device=CPU, captures=captures
        )
        while captures.capture_next():
            pass
        self.seconds: list[float] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        for new_row in plan.new_rows:
            self._states.set_row(new_row)
        began_at = time.perf_counter()
        descriptor = self._graphs.find(plan)
        if descriptor is None:
            return StepHandle(plan)
        results = self._graphs.step(descriptor, plan.scheduled)
        pending = _pending(plan, results)
        self.seconds.append(time.perf_counter() - began_at)
        return StepHandle(plan, pending=pending)

    def provide(self, handle: StepHandle, inputs: HostInputs) -> None:
        raise AssertionError("no request has a grammar")

    def collect(self, handle: StepHandle) -> StepOutput:
        if handle.pending is None:  # a step with prompts in it
            rows = [RowResult(token_ids=[7] if entry.samples else []) for entry in handle.plan.scheduled]
            return StepOutput(step=handle.plan.step, rows=rows)
        began_at = time.perf_counter()
        output = handle.pending.result()
        self.seconds[-1] += time.perf_counter() - began_at
        return output

    def _run_step(self, layout: BatchLayout, descriptor: StepDescriptor) -> torch.Tensor:
        return self._results[: descriptor.num_reqs]


def _pending(plan: StepPlan, results: torch.Tensor) -> PendingOutput:
    num_reqs = len(plan.scheduled)
    return PendingOutput(
        plan.step,
        plan.scheduled,
        StepTensors(results=results),
        draft_methods=[NO_METHOD] * num_reqs,
        drafter_errors=[False] * num_reqs,
        num_logprobs=[None] * num_reqs,
        num_prompt_logprobs={},
        phase_seconds={},
        graph_kind="full",
        num_padding_tokens=0,
        copy_stream=None,
    )


def make_core(checkpoint: Path, batch: int) -> tuple[EngineCore, InstantDevice]:
    config = engine_config(
        model={"model": str(checkpoint), "load_format": "dummy"},
        device="cpu",
        max_steps_in_flight=2,
        scheduler={"max_num_seqs": batch, "max_num_batched_tokens": 16384, "max_prefill_stall": None},
        cache={
            "enable_prefix_cache": False,
            "num_blocks": batch * (PROMPT_LEN + OUTPUT_LEN + BLOCK_SIZE) // BLOCK_SIZE + BLOCK_SIZE,
            "block_size": BLOCK_SIZE,
        },
    )
    device = InstantDevice(batch)

    def build(config: EngineConfig, on_progress: object) -> EngineParts:
        loaded = load_model(config.model, device=CPU)
        return assemble(config, loaded, device=CPU, wrap_executor=lambda executor: device)

    return EngineCore(config, build=build), device


def measure(checkpoint: Path, batch: int) -> dict[str, float]:
    """Milliseconds of a step on the host: all of it, and its parts."""
    core, device = make_core(checkpoint, batch)
    spare_what_is_loaded()  # as an engine process does
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = [5] * (PROMPT_LEN - index % BLOCK_SIZE)
        core.handle(AddRequest(request_id=str(index), prompt_token_ids=prompt, params=params))
    seconds: dict[str, list[float]] = {"step": [], "schedule": [], "output": []}
    while core.has_work:
        began_at = time.perf_counter()
        message = core.step()
        lasted = time.perf_counter() - began_at
        if message is not None and message.step is not None and message.step.num_decode_requests == batch:
            for name, taken in {**message.step.phase_seconds, "step": lasted}.items():
                if name in seconds:
                    seconds[name].append(taken)
    del seconds["step"][-2:]  # nothing is launched in these any more, and requests end
    seconds["worker"] = device.seconds
    return {f"{name}_ms": 1e3 * statistics.median(taken) for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder)
        (checkpoint / "config.json").write_text(json.dumps(GEOMETRY))
        for batch in arguments.batch:
            runs = [measure(checkpoint, batch) for _ in range(arguments.runs)]
            row = {name: min(run[name] for run in runs) for name in runs[0]}
            row = {"batch": batch, **row, "us_per_request": 1e3 * row["step_ms"] / batch}
            print(json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)


if __name__ == "__main__":
    main()
