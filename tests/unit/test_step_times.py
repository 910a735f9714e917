"""How long a step took, as the draft policy is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

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


@pytest.mark.parametrize(("depth", "host_draft_seconds"), [(1, 0.0), (1, 3.0), (2, 0.0)])
def test_every_second_is_of_one_step(
    depth: int, host_draft_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two steps in flight one is launched while the one before it runs: it begins when that one ends."""
    clock, observed = SimpleNamespace(now=100.0), []
    monkeypatch.setattr("engine.core.time", SimpleNamespace(monotonic=lambda: clock.now))
    core: Any = make_core(scripted_model(eos=()), deferred=depth > 1, config={"max_steps_in_flight": depth})

    def taking(seconds: float, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            clock.now += seconds
            return inner(*args)

        return call

    monkeypatch.setattr(core._executor, "collect", taking(10.0, core._executor.collect))
    on_host = taking(host_draft_seconds, core._scheduler.make_host_drafts)
    monkeypatch.setattr(core._scheduler, "make_host_drafts", on_host)
    monkeypatch.setattr(core._scheduler, "observe_step", lambda plan, *seconds: observed.append(seconds))
    Harness(core).run([request("r", (3, 4, 5), max_tokens=6)])
    assert len(observed) >= 6
    assert {seconds for seconds, _ in observed} == {10.0 + host_draft_seconds}
    assert sum(seconds for seconds, _ in observed) == clock.now - 100.0
    assert all(0.0 <= drafting - host_draft_seconds < 1.0 for _, drafting in observed), (
        "beside the worker's own"
    )


def test_the_stats_of_a_step_say_how_it_ran_and_how_long_each_phase_took() -> None:
    core: Any = make_core(scripted_model())
    collect = core._executor.collect

    def replayed(handle: StepHandle) -> StepOutput:
        output: StepOutput = collect(handle)
        output.graph_kind, output.num_padding_tokens = "full", 3
        output.phase_seconds = {"forward": 0.25}
        return output

    core._executor.collect = replayed
    core.handle(request("r", [5, 6, 7]))
    stats = core.step().step
    assert (stats.graph_kind, stats.num_padding_tokens, stats.phase_seconds["forward"]) == ("full", 3, 0.25)
    assert {"schedule", "output"} <= stats.phase_seconds.keys()
