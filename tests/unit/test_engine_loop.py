"""The engine's loop, turn by turn: when it waits, when it prepares, and what Shutdown and failures leave behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from engine.control import AnyAction, AnyResult
from engine.errors import EngineError, InvalidRequestError
from engine.loop import Command, run_engine
from engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FinishInfo,
    FromEngine,
    LoadProgress,
    ModelInfo,
    RequestOutput,
    RequestRefused,
    Shutdown,
    StepMessage,
)
from engine.stats import EngineStats
from tests.support.fake_core import FakeCore, fake_config, fake_request


class LoggingCore:
    """A request takes `num_steps` steps; of `num_pieces` pieces of work, one is done at each call of `prepare`."""

    def __init__(self, log: list[str], num_steps: int, num_pieces: int, fault: Exception | None) -> None:
        self.model_info: ModelInfo = FakeCore(fake_config(), lambda progress: None).model_info
        self._log, self._num_steps, self._num_pieces, self._fault = log, num_steps, num_pieces, fault
        self._steps_left: dict[str, int] = {}

    def handle(self, message: AddRequest | AbortRequests) -> StepMessage | None:
        if isinstance(message, AddRequest):
            if message.cache_salt == "refused":
                raise InvalidRequestError("prompt", "is not liked")
            self._steps_left[message.request_id] = self._num_steps
            return None
        self._log.append(f"abort {','.join(message.request_ids)}")
        return self._message(message.request_ids, "cancelled")

    def control(self, action: AnyAction, answer: Callable[[AnyResult | EngineError], None]) -> None:
        raise AssertionError("nobody asks for that here")

    @property
    def has_work(self) -> bool:
        return bool(self._steps_left)

    def step(self) -> StepMessage | None:
        self._log.append("step")
        if self._fault is not None:
            raise self._fault
        for request_id in self._steps_left:
            self._steps_left[request_id] -= 1
        return self._message([name for name, left in self._steps_left.items() if left == 0], "length")

    def prepare(self) -> bool:
        assert not self.has_work
        self._num_pieces -= 1
        self._log.append("prepare" if self._num_pieces >= 0 else "idle")
        return self._num_pieces >= 0

    def close(self) -> None:
        self._log.append("close")

    def _message(self, ended: list[str], reason: Literal["cancelled", "length"]) -> StepMessage:
        for request_id in ended:
            self._steps_left.pop(request_id, None)
        outputs = [RequestOutput(request_id=name, finish=FinishInfo(reason=reason)) for name in ended]
        return StepMessage(outputs=outputs, stats=EngineStats())


class Script:
    """Gives a group of commands at each poll, then Shutdown; a poll that blocks is noted."""

    def __init__(self, log: list[str], *turns: list[Command]) -> None:
        self._log, self._turns = log, iter(turns)

    def poll(self, block: bool) -> list[Command]:
        self._log.append("wait" if block else "look")
        return next(self._turns, [Shutdown()])


def run(
    *turns: list[Command], num_steps: int = 2, num_pieces: int = 0, fault: Exception | None = None
) -> tuple[bool, list[str], list[FromEngine]]:
    """Whether it ended well, what was called in which order, and what was published after the model's info."""
    log: list[str] = []
    published: list[FromEngine] = []

    def make_core(publish: Callable[[LoadProgress], None]) -> LoggingCore:
        return LoggingCore(log, num_steps, num_pieces, fault)

    is_well = run_engine(make_core, Script(log, *turns), published.append)
    assert isinstance(published[0], ModelInfo)
    return is_well, log, published[1:]


def test_it_prepares_piece_by_piece_while_idle_and_waits_only_when_nothing_is_left() -> None:
    is_well, log, _ = run([], [], [], num_pieces=2)
    assert is_well
    assert log[:6] == ["prepare", "look", "prepare", "look", "idle", "wait"]


def test_a_request_is_stepped_to_its_end_before_anything_is_prepared_again() -> None:
    _, log, published = run([fake_request("r")], [], [], num_steps=2, num_pieces=2)
    assert log[:7] == ["prepare", "look", "step", "look", "step", "prepare", "look"]
    assert [message.outputs != [] for message in published if isinstance(message, StepMessage)] == [
        False,
        True,
        False,  # of the Shutdown, that found nobody
    ]


def test_shutdown_cancels_who_is_live_and_closes() -> None:
    is_well, log, published = run([fake_request("b"), fake_request("a")], num_steps=5)
    assert (is_well, log[-2:]) == (True, ["abort a,b", "close"])
    message = published[-1]
    assert isinstance(message, StepMessage)
    assert [output.request_id for output in message.outputs] == ["a", "b"]


def test_shutdown_cancels_nobody_who_ended_or_was_refused() -> None:
    _, log, _ = run([fake_request("ended"), fake_request("refused", does="refused")], [], num_steps=1)
    assert log[-2:] == ["abort ", "close"]


def test_who_is_refused_is_told_and_commands_behind_it_are_taken() -> None:
    _, log, published = run([fake_request("refused", does="refused"), fake_request("good")], num_steps=1)
    (refused,) = [message for message in published if isinstance(message, RequestRefused)]
    assert refused.request_id == "refused"
    assert log.count("step") == 1


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(InvalidRequestError("a", "b"), "InvalidRequestError"), (ZeroDivisionError(), "internal")],
)
def test_what_a_step_raises_ends_the_engine_and_is_published(fault: Exception, kind: str) -> None:
    is_well, log, published = run([fake_request("r")], fault=fault)
    assert not is_well
    failure = published[-1]
    assert isinstance(failure, EngineFailed)
    assert failure.error == kind
    assert log[-1] == "step", "what failed is not touched again"
