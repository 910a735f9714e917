"""Engines on a CUDA device, whose launches may not wait for it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.assembly import assemble
from engine.config import EngineConfig, engine_config
from engine.core import EngineCore
from engine.cudagraph import CudaGraphManager
from engine.executor import Executor, StepHandle
from engine.models.loader import load_model
from engine.step import HostInputs, StepOutput, StepPlan

DEVICE = torch.device("cuda")


class SyncFreeExecutor(Executor):
    """Launching a step with torch's sync detector armed: any wait of the host is an error."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def launch(self, plan: StepPlan) -> StepHandle:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls the detector a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            return self._inner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def provide(self, handle: StepHandle, inputs: HostInputs) -> None:
        self._inner.provide(handle, inputs)

    def collect(self, handle: StepHandle) -> StepOutput:
        return self._inner.collect(handle)

    def prepare(self) -> bool:
        return self._inner.prepare()


def make_cuda_core(*, sync_free: bool = False, **config: Any) -> EngineCore:
    """`config`: the fields of EngineConfig."""
    settings = engine_config(device="cuda", draft_policy="first", **config)

    def build(config: EngineConfig, on_progress: Any) -> Any:
        loaded = load_model(config.model, device=DEVICE)
        wrap: Callable[[Executor], Executor] = SyncFreeExecutor if sync_free else lambda executor: executor
        return assemble(config, loaded, device=DEVICE, wrap_executor=wrap)

    return EngineCore(settings, build=build)


def capture_all(core: EngineCore) -> None:
    while core.prepare():
        pass


def count_replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """By class of manager, from now on."""
    counts: Counter[str] = Counter()
    replay = CudaGraphManager.replay

    def counted(self: CudaGraphManager[Any], descriptor: Any) -> None:
        counts[type(self).__name__] += 1
        replay(self, descriptor)

    monkeypatch.setattr(CudaGraphManager, "replay", counted)
    return counts
