"""Does what an administrator asks of the engine, between two steps: engine/control.py says what there is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.control import (
    MAX_PROFILED_STEPS,
    AnyAction,
    AnyResult,
    ConfigureSpeculation,
    Done,
    DumpScheduler,
    GetSpeculation,
    Profile,
    ProfileWritten,
    SetLogLevel,
)
from engine.errors import EngineError, InvalidRequestError, RequestFailedError
from engine.scheduler.adjustable_policy import AdjustableDraftPolicy
from engine.scheduler.scheduler import Scheduler
from engine.worker.step_trace import StepTrace

Answer = Callable[[AnyResult | EngineError], None]


class Trace(Protocol):
    """What records steps: engine.worker.step_trace.StepTrace."""

    def write(self, path: Path) -> None: ...


@dataclass
class _Profiling:
    trace: Trace
    num_steps_left: int
    path: Path
    answer: Answer


class EngineController:
    """One per engine core, on its thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        draft_policy: AdjustableDraftPolicy,
        profile_directory: str | None,
        *,
        start_trace: Callable[[], Trace] = StepTrace,
    ) -> None:
        self._scheduler = scheduler
        self._draft_policy = draft_policy
        self._profile_directory = None if profile_directory is None else Path(profile_directory)
        self._start_trace = start_trace
        self._profiling: _Profiling | None = None

    def handle(self, action: AnyAction, answer: Answer) -> None:
        """Call `answer` now or when it is done. Raises EngineError for what is refused."""
        match action:
            case SetLogLevel():
                logging.getLogger().setLevel(action.level.upper())
                answer(Done())
            case GetSpeculation():
                answer(self._draft_policy.state())
            case ConfigureSpeculation():
                self._draft_policy.configure(action)
                answer(self._draft_policy.state())
            case DumpScheduler():
                answer(self._scheduler.dump())
            case Profile():
                self._profile(action.num_steps, answer)

    def step_ended(self) -> None:
        """The core has collected a step."""
        profiling = self._profiling
        if profiling is None:
            return
        profiling.num_steps_left -= 1
        if profiling.num_steps_left == 0:
            self._end_profile(profiling)

    def close(self) -> None:
        """No step follows. A profile ends with those that it has: the profiler must not outlive the engine."""
        if self._profiling is not None:
            self._end_profile(self._profiling)

    def _end_profile(self, profiling: _Profiling) -> None:
        self._profiling = None
        try:
            profiling.trace.write(profiling.path)
        except OSError as error:
            profiling.answer(RequestFailedError(f"cannot write the trace: {error.strerror}"))
        else:
            profiling.answer(ProfileWritten(str(profiling.path)))

    def _profile(self, num_steps: int, answer: Answer) -> None:
        if not 1 <= num_steps <= MAX_PROFILED_STEPS:
            raise InvalidRequestError("num_steps", f"got {num_steps}, expected 1..{MAX_PROFILED_STEPS}")
        if self._profile_directory is None:
            raise InvalidRequestError("num_steps", "the server was started without --profile-directory")
        if self._profiling is not None:
            raise RequestFailedError("a profile is being recorded, one at a time is possible")
        path = self._profile_directory / f"steps-{time.time_ns()}.json.gz"
        self._profiling = _Profiling(self._start_trace(), num_steps, path, answer)
