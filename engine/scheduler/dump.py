"""What the scheduler knows of its live requests, as data for an administrator; never their text."""

from __future__ import annotations

from collections.abc import Iterable

from engine.control import ScheduledRequestState, SchedulerState
from engine.request import NO_METHOD, Request, RequestStatus
from engine.stats import EngineStats


def dump(
    requests: Iterable[Request], stats: EngineStats, *, num_steps_in_flight: int, now: float
) -> SchedulerState:
    """`now`: of the clock that stamps arrivals."""
    ordered = sorted(
        requests, key=lambda request: (request.status is not RequestStatus.RUNNING, request.order)
    )
    return SchedulerState(
        requests=tuple(_describe(request, now) for request in ordered),
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_preemptions_total=stats.num_preemptions_total,
        num_steps_in_flight=num_steps_in_flight,
    )


def _describe(request: Request, now: float) -> ScheduledRequestState:
    return ScheduledRequestState(
        request_id=request.request_id,
        tenant=request.message.tenant,
        status=request.status.value,
        priority=request.priority,
        age=now - request.times.arrival,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_emitted_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_in_flight_tokens=request.num_in_flight_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        draft_method=NO_METHOD if request.draft_method is None else request.draft_method.name,
    )
