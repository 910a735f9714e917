"""Launch, provide, collect: how the core runs steps without waiting for them.

The contract is plain data in (StepPlan, HostInputs) and out (StepOutput), so that an executor with one process per
device can broadcast it. `SingleExecutor` drives one model runner in this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from engine.step import HostInputs, StepOutput, StepPlan
from engine.worker.model_runner import ModelRunner, TargetPass
from engine.worker.output import PendingOutput


@dataclass
class StepHandle:
    """A launched step. `target` until part B was launched, `pending` from then on."""

    plan: StepPlan
    target: TargetPass | None = None
    pending: PendingOutput | None = None


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


class SingleExecutor(Executor):
    """One model runner, one device."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> StepHandle:
        pending = self._runner.launch_decode(plan)
        if pending is not None:
            return StepHandle(plan, pending=pending)
        handle = StepHandle(plan, target=self._runner.launch_target(plan))
        if not plan.needs_host_inputs:
            self._verify(handle, None)
        return handle

    def provide(self, handle: StepHandle, inputs: HostInputs) -> None:
        assert handle.plan.needs_host_inputs, "this step does not wait for host inputs"
        self._verify(handle, inputs)

    def collect(self, handle: StepHandle) -> StepOutput:
        assert handle.pending is not None, "collect before provide"
        return handle.pending.result()

    def _verify(self, handle: StepHandle, inputs: HostInputs | None) -> None:
        assert handle.target is not None, "part B was launched already"
        handle.pending = self._runner.launch_verify(handle.target, inputs)
        handle.target = None
