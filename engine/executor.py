"""Launch, provide, collect: how the core runs steps without waiting for them.

The contract is plain data in (StepPlan, HostInputs) and out (StepOutput), so that an executor with one process per
device can broadcast it. `SingleExecutor` drives one model runner in this process.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.step import HostInputs, RowResult, StepOutput, StepPlan
from engine.worker.model_runner import ModelRunner, TargetPass
from engine.worker.output import PendingOutput

logger = logging.getLogger(__name__)


@dataclass
class StepHandle:
    """A launched step. `target` until part B was launched, `pending` from then on; `failure`: neither, and why."""

    plan: StepPlan
    target: TargetPass | None = None
    pending: PendingOutput | None = None
    failure: str = ""


class Executor(ABC):
    """Steps are launched, provided and collected in the order of their numbers."""

    @abstractmethod
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step; do not wait for it. With `plan.needs_host_inputs` it stops before verification."""

    @abstractmethod
    def provide(self, handle: StepHandle, inputs: HostInputs) -> None:
        """Give a step that waits its late host data; it goes on."""

    @abstractmethod
    def collect(self, handle: StepHandle) -> StepOutput:
        """Wait for the step and return what it brought."""

    def prepare(self) -> bool:
        """While no step is in flight: a piece of work that later steps profit from. False: there is none."""
        return False


class SingleExecutor(Executor):
    """One model runner, one device."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> StepHandle:
        handle = StepHandle(plan)
        with self._surviving(handle):
            handle.pending = self._runner.launch_captured(plan)
            if handle.pending is None:
                handle.target = self._runner.launch_target(plan)
        if handle.target is not None and not plan.needs_host_inputs:
            self._verify(handle, None)
        return handle

    def provide(self, handle: StepHandle, inputs: HostInputs) -> None:
        assert handle.plan.needs_host_inputs, "this step does not wait for host inputs"
        self._verify(handle, inputs)

    def collect(self, handle: StepHandle) -> StepOutput:
        if handle.failure:
            rows = [RowResult(failure=handle.failure) for _ in handle.plan.scheduled]
            return StepOutput(step=handle.plan.step, rows=rows)
        assert handle.pending is not None, "collect before provide"
        return handle.pending.result()

    def prepare(self) -> bool:
        return self._runner.capture_next()

    def _verify(self, handle: StepHandle, inputs: HostInputs | None) -> None:
        if handle.failure:
            return
        assert handle.target is not None, "part B was launched already"
        with self._surviving(handle):
            handle.pending = self._runner.launch_verify(handle.target, inputs)
        handle.target = None

    @contextmanager
    def _surviving(self, handle: StepHandle) -> Iterator[None]:
        """A step that finds no memory ends the requests in it, not the engine."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            logger.error("step %d: no memory on the device, its requests fail: %s", handle.plan.step, error)
            handle.failure = (
                "the device had no memory for a step; a shorter request may work, or another time"
            )
            handle.target = None
            torch.cuda.empty_cache()
