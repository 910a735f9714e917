"""How long a step took, as the draft policy is told."""

from __future__ import annotations

from typing import Any

from engine.executor import Executor, StepHandle
from engine.spec_decode.ngram import NgramSpeculator
from engine.step import HostInputs, StepOutput, StepPlan
from tests.support.engine_harness import Harness, make_core, request, scripted_model


class CompilingExecutor(Executor):
    """Launching the drafts of one step takes long, and is over before the step ahead is collected."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def launch(self, plan: StepPlan) -> StepHandle:
        return self._inner.launch(plan)

    def provide(self, handle: StepHandle, inputs: HostInputs) -> None:
        self._inner.provide(handle, inputs)

    def collect(self, handle: StepHandle) -> StepOutput:
        output = self._inner.collect(handle)
        if handle.plan.step == 3:
            output.phase_seconds["draft"] += 5.0
        return output


def test_a_step_takes_longer_than_its_drafts_also_if_they_were_launched_before_it_began() -> None:
    core: Any = make_core(
        scripted_model(), speculators={"ngram": NgramSpeculator()}, k=3, config={"max_steps_in_flight": 2}
    )
    core._executor = CompilingExecutor(core._executor)
    observed: list[tuple[float, float]] = []
    core._scheduler.observe_step = lambda plan, seconds, draft_seconds: observed.append(
        (seconds, draft_seconds)
    )
    Harness(core).run([request("r", [5, 6, 7, 5, 6, 7], ignore_eos=True)])
    assert any(draft_seconds > 5.0 for _, draft_seconds in observed)
    assert all(seconds > draft_seconds for seconds, draft_seconds in observed)
