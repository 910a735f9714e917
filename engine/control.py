"""What an administrator may ask of a running engine, and what it answers: msgspec data, like engine/messages.py.

Each action names the type of its answer, so that `EngineClient.control` is typed end to end. A new one is a class
here, in `AnyAction` (and its answer in `AnyResult`), and a case in engine/controller.py.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

Result = TypeVar("Result")
LogLevel = Literal["debug", "info", "warning", "error"]
MAX_PROFILED_STEPS = 1000


# ---- answers -----------------------------------------------------------------------------------------------


class Done(msgspec.Struct, tag=True, frozen=True):
    """There is nothing to tell."""


class SpeculatorState(msgspec.Struct, kw_only=True, frozen=True):
    """A loaded draft method."""

    method: str
    is_enabled: bool
    k: int  # most drafts for a request, and what one gets that sets no number
    max_k: int  # as loaded


class SpeculationState(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """All loaded draft methods, and what stands for the method that a request leaves unset."""

    speculators: tuple[SpeculatorState, ...]
    default_method: str


class ProfileWritten(msgspec.Struct, tag=True, frozen=True):
    """Where the trace is."""

    path: str


class ScheduledRequestState(msgspec.Struct, kw_only=True, frozen=True):
    """One live request, without its text."""

    request_id: str
    tenant: str
    status: str
    priority: int
    age: float  # seconds since it arrived
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    draft_method: str


class SchedulerState(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """Running requests in the order in which they are served, then waiting ones."""

    requests: tuple[ScheduledRequestState, ...]
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions_total: int
    num_steps_in_flight: int


# ---- actions -----------------------------------------------------------------------------------------------


class Action(msgspec.Struct, Generic[Result], frozen=True):
    """Something to do, answered by a Result."""


class SetLogLevel(Action[Done], tag=True, frozen=True):
    """Of the engine's process."""

    level: LogLevel


class GetSpeculation(Action[SpeculationState], tag=True, frozen=True):
    """Tell, change nothing."""


class SpeculatorChange(msgspec.Struct, kw_only=True, frozen=True):
    """None: as it is."""

    method: str
    is_enabled: bool | None = None
    k: int | None = None


class ConfigureSpeculation(Action[SpeculationState], tag=True, kw_only=True, frozen=True):
    """All changes or none."""

    changes: tuple[SpeculatorChange, ...] = ()
    default_method: str | None = None


class Profile(Action[ProfileWritten], tag=True, frozen=True):
    """Record the next steps; answered when the trace is written."""

    num_steps: int


class DumpScheduler(Action[SchedulerState], tag=True, frozen=True):
    """What the scheduler knows."""


AnyAction = SetLogLevel | GetSpeculation | ConfigureSpeculation | Profile | DumpScheduler
AnyResult = Done | SpeculationState | ProfileWritten | SchedulerState
