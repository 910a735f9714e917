"""The RPCs of slipstream.v1.AdminService: each translates a request to an action of the engine and its answer back.

Who may call is decided before (server/listeners.py), what an action does elsewhere (engine/controller.py).
"""

# ruff: noqa: N802 - methods have the names of the RPCs

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc

from engine.client.base import EngineClient
from engine.control import (
    ConfigureSpeculation,
    DumpScheduler,
    GetSpeculation,
    LogLevel,
    Profile,
    ScheduledRequestState,
    SetLogLevel,
    SpeculationState,
    SpeculatorChange,
)
from engine.errors import EngineUnavailableError, InvalidRequestError
from server.callers import unscoped
from server.fields import check_fields
from server.pb.slipstream.v1 import admin_pb2 as pb
from server.pb.slipstream.v1 import admin_pb2_grpc as pb_grpc

ADMIN_SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
DEFAULT_PROFILED_STEPS = 10
_LOG_LEVELS: dict[int, LogLevel] = {
    pb.LOG_LEVEL_DEBUG: "debug",
    pb.LOG_LEVEL_INFO: "info",
    pb.LOG_LEVEL_WARNING: "warning",
    pb.LOG_LEVEL_ERROR: "error",
}

Context = grpc.aio.ServicerContext[Any, Any]


class AdminService(pb_grpc.AdminServiceServicer):
    """Has an engine from `serve` on; draining is possible before."""

    def __init__(self, drain: Callable[[], None], num_running: Callable[[], int]) -> None:
        self._drain = drain
        self._num_running = num_running
        self._client: EngineClient | None = None

    def serve(self, client: EngineClient) -> None:
        self._client = client

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        check_fields(request)
        self._drain()
        return pb.DrainResponse(running_requests=self._num_running())

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: Context) -> pb.SetLogLevelResponse:
        check_fields(request)
        level = _LOG_LEVELS.get(request.level)
        if level is None:
            names = ", ".join(map(pb.LogLevel.Name, _LOG_LEVELS))
            raise InvalidRequestError("level", f"got {request.level}, expected one of {names}")
        await self._engine().control(SetLogLevel(level))
        logging.getLogger().setLevel(level.upper())
        return pb.SetLogLevelResponse()

    async def ListSpeculators(
        self, request: pb.ListSpeculatorsRequest, context: Context
    ) -> pb.ListSpeculatorsResponse:
        check_fields(request)
        state = await self._engine().control(GetSpeculation())
        return pb.ListSpeculatorsResponse(
            speculators=_speculators(state), default_method=state.default_method
        )

    async def ConfigureSpeculation(
        self, request: pb.ConfigureSpeculationRequest, context: Context
    ) -> pb.ConfigureSpeculationResponse:
        check_fields(request)
        methods = [change.method for change in request.speculators]
        if len(set(methods)) < len(methods):
            raise InvalidRequestError("speculators", f"got {methods}, expected each method once")
        action = ConfigureSpeculation(
            changes=tuple(map(_change, request.speculators)),
            default_method=request.default_method if request.HasField("default_method") else None,
        )
        state = await self._engine().control(action)
        return pb.ConfigureSpeculationResponse(
            speculators=_speculators(state), default_method=state.default_method
        )

    async def Profile(self, request: pb.ProfileRequest, context: Context) -> pb.ProfileResponse:
        check_fields(request)
        num_steps = request.num_steps if request.HasField("num_steps") else DEFAULT_PROFILED_STEPS
        written = await self._engine().control(Profile(num_steps))
        return pb.ProfileResponse(path=written.path)

    async def DumpScheduler(
        self, request: pb.DumpSchedulerRequest, context: Context
    ) -> pb.DumpSchedulerResponse:
        check_fields(request)
        state = await self._engine().control(DumpScheduler())
        return pb.DumpSchedulerResponse(
            requests=map(_scheduled_request, state.requests),
            num_blocks=state.num_blocks,
            num_free_blocks=state.num_free_blocks,
            num_cached_blocks=state.num_cached_blocks,
            num_preemptions_total=state.num_preemptions_total,
            num_steps_in_flight=state.num_steps_in_flight,
        )

    def _engine(self) -> EngineClient:
        if self._client is None:
            raise EngineUnavailableError("the engine is loading")
        return self._client


def _change(settings: pb.SpeculatorSettings) -> SpeculatorChange:
    has_k = settings.HasField("num_speculative_tokens")
    return SpeculatorChange(
        method=settings.method,
        is_enabled=settings.enabled if settings.HasField("enabled") else None,
        k=settings.num_speculative_tokens if has_k else None,
    )


def _speculators(state: SpeculationState) -> list[pb.Speculator]:
    return [
        pb.Speculator(
            method=speculator.method,
            enabled=speculator.is_enabled,
            num_speculative_tokens=speculator.k,
            max_speculative_tokens=speculator.max_k,
        )
        for speculator in state.speculators
    ]


def _scheduled_request(request: ScheduledRequestState) -> pb.ScheduledRequest:
    return pb.ScheduledRequest(
        request_id=unscoped(request.tenant, request.request_id),
        tenant=request.tenant,
        status=request.status,
        priority=request.priority,
        age=request.age,
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        computed_tokens=request.num_computed_tokens,
        in_flight_tokens=request.num_in_flight_tokens,
        cached_tokens=request.num_cached_tokens,
        preemptions=request.num_preemptions,
        draft_method=request.draft_method,
    )
