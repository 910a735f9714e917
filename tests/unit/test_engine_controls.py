"""What an administrator changes and asks while the engine runs: speculators, profiles, the scheduler's state."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.control import (
    AnyAction,
    AnyResult,
    ConfigureSpeculation,
    DumpScheduler,
    GetSpeculation,
    Profile,
    ProfileWritten,
    SchedulerState,
    SpeculationState,
    SpeculatorChange,
    SpeculatorState,
)
from engine.core import EngineCore
from engine.errors import EngineError, InvalidRequestError, RequestFailedError
from engine.loop import Command, run_engine
from engine.messages import Control, ControlAnswer, FromEngine, ModelInfo, Shutdown
from tests.support.engine_harness import Harness, make_core, request, scripted_model
from tests.support.scripted_speculators import PATTERNS, VOCAB_SIZE, ScriptedSpeculator
from tests.support.scripted_target import ScriptedTarget, reference_continuation

PROMPT = tuple(range(3, 13))
MAX_TOKENS, K = 24, 3
FUTURE = reference_continuation(ScriptedTarget(VOCAB_SIZE), list(PROMPT), MAX_TOKENS + 8)


def scripted_core(profile_directory: Path | None = None) -> EngineCore:
    """Two draft methods; `right`, the default, always is."""
    speculators = {
        "right": ScriptedSpeculator(PATTERNS["oracle"], {PROMPT: FUTURE}),
        "wrong": ScriptedSpeculator(PATTERNS["always_wrong"], {PROMPT: FUTURE}),
    }
    directory = None if profile_directory is None else str(profile_directory)
    return make_core(
        scripted_model(eos=()), speculators=speculators, k=K, config={"profile_directory": directory}
    )


def control(core: EngineCore, action: AnyAction) -> Any:
    """The answer of an action that is answered at once."""
    answers: list[AnyResult | EngineError] = []
    core.control(action, answers.append)
    (answer,) = answers
    return answer


def configure(core: EngineCore, *changes: SpeculatorChange, default: str | None = None) -> SpeculationState:
    answer = control(core, ConfigureSpeculation(changes=changes, default_method=default))
    assert isinstance(answer, SpeculationState)
    return answer


def disable(method: str) -> SpeculatorChange:
    return SpeculatorChange(method=method, is_enabled=False)


def drafted(core: EngineCore, method: str | None = None, k: int | None = None) -> set[tuple[str, int]]:
    """Methods and most drafts of one request, whose tokens are those of plain decoding."""
    made = request("r", PROMPT, max_tokens=MAX_TOKENS, method=method, k=k)
    result = Harness(core).run([made])["r"]
    assert result.token_ids == FUTURE[:MAX_TOKENS]
    most: dict[str, int] = {}
    for item in result.spec:
        most[item.method] = max(item.num_drafted, most.get(item.method, 0))
    return set(most.items())


def test_the_state_at_the_start_is_that_of_the_configuration() -> None:
    assert control(scripted_core(), GetSpeculation()) == SpeculationState(
        speculators=(
            SpeculatorState(method="right", is_enabled=True, k=K, max_k=K),
            SpeculatorState(method="wrong", is_enabled=True, k=K, max_k=K),
        ),
        default_method="right",
    )


def test_the_default_is_changed_for_new_requests_and_told_to_frontends() -> None:
    core = scripted_core()
    assert drafted(core) == {("right", K)}
    info = core.model_info
    assert configure(core, default="wrong").default_method == "wrong"
    assert (core.model_info.default_speculator, info.default_speculator) == ("wrong", "right")
    assert drafted(core) == {("wrong", K)}
    assert drafted(core, "right") == {("right", K)}
    configure(core, default="none")
    assert drafted(core) == set()
    configure(core, default="auto")
    assert drafted(core)


def test_a_disabled_method_drafts_for_nobody_until_it_is_enabled_again() -> None:
    core = scripted_core()
    configure(core, disable("right"))
    assert drafted(core) == set()
    assert drafted(core, "right") == set()
    assert drafted(core, "wrong") == {("wrong", K)}
    assert {method for method, _ in drafted(core, "auto")} <= {"wrong"}
    configure(core, disable("wrong"))
    assert drafted(core, "auto") == set()
    configure(core, SpeculatorChange(method="right", is_enabled=True))
    assert drafted(core) == {("right", K)}


def test_a_running_request_loses_and_regains_its_drafter() -> None:
    core = scripted_core()
    harness = Harness(core)
    harness.add(request("r", PROMPT, max_tokens=MAX_TOKENS))
    for _ in range(2):
        harness.step()
    configure(core, disable("right"))
    harness.step()  # may still verify what was drafted before
    num_before = len(harness.results["r"].spec)
    harness.step()
    assert len(harness.results["r"].spec) == num_before
    configure(core, SpeculatorChange(method="right", is_enabled=True))
    result = harness.run()["r"]
    assert len(result.spec) > num_before
    assert result.token_ids == FUTURE[:MAX_TOKENS]


def test_k_is_lowered_and_raised_again_up_to_what_was_loaded() -> None:
    core = scripted_core()
    configure(core, SpeculatorChange(method="right", k=1))
    assert drafted(core) == {("right", 1)}
    assert drafted(core, "right", 2) == {("right", 1)}
    configure(core, SpeculatorChange(method="right", k=K))
    assert drafted(core) == {("right", K)}


@pytest.mark.parametrize(
    ("action", "field"),
    [
        (ConfigureSpeculation(changes=(disable("right"), disable("other"))), "speculators[1].method"),
        (
            ConfigureSpeculation(
                changes=(disable("right"), SpeculatorChange(method="wrong", k=K + 1)), default_method="none"
            ),
            "speculators[1].num_speculative_tokens",
        ),
        (
            ConfigureSpeculation(changes=(SpeculatorChange(method="wrong", k=0),)),
            "speculators[0].num_speculative_tokens",
        ),
        (ConfigureSpeculation(changes=(disable("right"),), default_method="best"), "default_method"),
    ],
)
def test_a_wrong_value_changes_nothing(action: ConfigureSpeculation, field: str) -> None:
    core = scripted_core()
    before = control(core, GetSpeculation())
    with pytest.raises(InvalidRequestError) as caught:
        control(core, action)
    assert caught.value.field == field
    assert control(core, GetSpeculation()) == before


def test_the_dump_shows_running_requests_in_order_then_waiting_ones() -> None:
    core = make_core(scripted_model(eos=()), scheduler={"max_num_seqs": 1})
    harness = Harness(core)
    for name, priority in (("first", 0), ("late", 1), ("soon", 0)):
        harness.add(request(name, PROMPT, priority=priority))
    for _ in range(3):
        harness.step()
    state = control(core, DumpScheduler())
    assert isinstance(state, SchedulerState)
    assert [(item.request_id, item.status, item.priority) for item in state.requests] == [
        ("first", "running", 0),
        ("soon", "waiting", 0),
        ("late", "waiting", 1),
    ]
    first = state.requests[0]
    assert (first.num_prompt_tokens, first.num_output_tokens) == (len(PROMPT), 3)
    assert first.num_computed_tokens == len(PROMPT) + 2
    assert first.age > 0
    assert state.num_blocks > state.num_free_blocks
    harness.run()
    assert control(core, DumpScheduler()).requests == ()


def test_a_profile_covers_the_next_steps_and_is_a_chrome_trace(tmp_path: Path) -> None:
    core = scripted_core(tmp_path / "traces")
    answers: list[AnyResult | EngineError] = []
    core.control(Profile(2), answers.append)
    with pytest.raises(RequestFailedError, match="one at a time"):
        control(core, Profile(1))
    harness = Harness(core)
    harness.add(request("r", PROMPT, max_tokens=MAX_TOKENS))
    harness.step()
    assert not answers
    harness.step()
    (written,) = answers
    assert isinstance(written, ProfileWritten)
    with gzip.open(written.path) as file:
        assert json.load(file)["traceEvents"]
    harness.run()
    assert len(answers) == 1


def test_a_profile_ends_with_the_engine(tmp_path: Path) -> None:
    core = scripted_core(tmp_path)
    answers: list[AnyResult | EngineError] = []
    core.control(Profile(100), answers.append)
    harness = Harness(core)
    harness.add(request("r", PROMPT, max_tokens=MAX_TOKENS))
    harness.step()
    core.close()
    (written,) = answers
    assert isinstance(written, ProfileWritten)
    assert Path(written.path).exists()
    core.close()
    assert len(answers) == 1


def test_a_profile_needs_a_directory_and_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--profile-directory"):
        control(scripted_core(), Profile(1))
    for num_steps in (0, 1001):
        with pytest.raises(InvalidRequestError, match=r"expected 1\.\.1000"):
            control(scripted_core(tmp_path), Profile(num_steps))


def test_a_trace_that_cannot_be_written_is_told_and_the_engine_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    core = scripted_core(tmp_path / "file")
    answers: list[AnyResult | EngineError] = []
    core.control(Profile(1), answers.append)
    assert drafted(core) == {("right", K)}
    assert isinstance(answers[0], RequestFailedError)


def test_what_changed_of_the_model_is_told_before_the_answer() -> None:
    """Whoever has the answer reads the new default from any frontend."""
    told: list[FromEngine] = []
    change = Control(control_id="c", action=ConfigureSpeculation(changes=(), default_method="wrong"))
    turns: Iterator[list[Command]] = iter([[change], [Shutdown()]])

    class Turns:
        def poll(self, block: bool) -> list[Command]:
            return next(turns)

    assert run_engine(lambda on_progress: scripted_core(), Turns(), told.append)
    before, after, answer = told
    assert isinstance(before, ModelInfo)
    assert isinstance(after, ModelInfo)
    assert isinstance(answer, ControlAnswer)
    assert (before.default_speculator, after.default_speculator) == ("right", "wrong")
