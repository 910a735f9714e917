"""An engine that takes the CPU for a GPU and only compiles: what it does before its first request.

python -m tests.support.compile_only_engine FAMILY:METHOD:VERIFICATION ..., with Triton's interpreter off.

No compiler runs, so no device is needed, but all else is as on one: which kernels would be launched, and torch's
operations on what these leave unwritten. Prints a line of JSON for each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget

import engine.assembly
from engine.assembly import assemble
from engine.attention.triton_backend import TritonAttentionBackend
from engine.config import ModelConfig, engine_config
from engine.core import EngineCore
from engine.cudagraph import CaptureQueue
from engine.kernels.compile_ahead import compile_ahead
from engine.models.loader import load_model
from engine.worker.first_steps import NUM_GRAPHS, first_steps
from engine.worker.model_runner import ModelRunner
from tests.support import tiny_drafters
from tests.support.tiny_drafters import Workshop

CPU = torch.device("cpu")
HOST_READS = ("item", "tolist", "__bool__", "__int__", "__index__", "nonzero", "cpu")
compiled: list[str] = []
host_reads: set[str] = set()


class Hopper:
    """As far as choosing a compilation goes."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


class OnDevice(TorchFunctionMode):
    """Tensors say that they are there, and reading them is noted."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = getattr(func, "__self__", None)
        if place is torch.Tensor.is_cuda or place is torch.Tensor.is_cpu:
            return place is torch.Tensor.is_cuda
        if func.__name__ in HOST_READS:
            host_reads.add(func.__name__)
        return func(*args, **(kwargs or {}))


def compile_nothing(source: Any, **_: Any) -> Any:
    compiled.append(source.name)
    return SimpleNamespace(run=None, module=None)


def compile_on_device(run: Callable[[], object]) -> None:
    def run_there() -> None:
        with OnDevice():
            run()

    compile_ahead(run_there)


def prepare(runner: ModelRunner, methods: Any, info: Any) -> None:
    """All passes that may come before a request, and what they leave."""
    caches = [
        tensor for cache in runner._target._eager.caches.values() for tensor in (cache.key, cache.value)
    ]  # type: ignore[attr-defined]
    before = [cache.clone() for cache in caches]

    def run_steps() -> None:
        for plan in first_steps(methods, info):
            runner.launch_verify(runner.launch_target(plan))

    compile_on_device(run_steps)
    num_compiled = len(compiled)
    runner.capture_first(NUM_GRAPHS)
    while runner.capture_next():
        pass
    report = {
        "compiled": [num_compiled, len(compiled)],
        "drafter_failures": sum(runner._speculators.num_failures.values()),
        "caches_are_untouched": all(map(torch.equal, before, caches)),
        "host_reads": sorted(host_reads),
    }
    print(json.dumps(report))


def take_cpu_for_gpu() -> None:
    triton.runtime.driver.set_active(Hopper())
    triton.compiler.compile = compile_nothing
    TritonAttentionBackend.runs_on = classmethod(lambda cls, device: True)  # type: ignore[assignment]
    engine.assembly.make_captures = lambda *_: CaptureQueue(lambda run: run, compile_ahead=compile_on_device)
    engine.assembly.prepare_first_steps = prepare
    engine.assembly.set_numerics = lambda *_: "fast"


def main(cases: Sequence[str]) -> None:
    for name in ("make_tiny_assistant", "add_mtp_layer"):  # what they draft does not matter
        setattr(tiny_drafters, name, partial(getattr(tiny_drafters, name), steps=0))
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for index, case in enumerate(cases):
            family, method, verification = case.split(":")
            workshop = Workshop(Path(folder) / str(index), family)
            speculators = (workshop.drafter(method),)
            loaded = load_model(ModelConfig(model=str(workshop.target_path), dtype="bfloat16"), device=CPU)
            parts.append((loaded, speculators, verification))
        take_cpu_for_gpu()
        for loaded, speculators, verification in parts:
            compiled.clear()
            host_reads.clear()
            config = engine_config(
                model={"model": "test"},
                device="cpu",
                max_model_len=256,
                speculators=speculators,
                verification=verification,
                attention_backend="triton",
                scheduler={"max_num_seqs": 32},
                cache={"num_blocks": 64},
            )
            EngineCore(config, build=lambda config, _: assemble(config, loaded, device=CPU)).close()  # noqa: B023


if __name__ == "__main__":
    main(sys.argv[1:])
