"""The admin service in front of a scripted engine: what becomes of each call, and who may call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from engine.control import (
    AnyResult,
    ConfigureSpeculation,
    Done,
    DumpScheduler,
    GetSpeculation,
    Profile,
    ProfileWritten,
    ScheduledRequestState,
    SchedulerState,
    SetLogLevel,
    SpeculationState,
    SpeculatorChange,
    SpeculatorState,
)
from engine.errors import ConfigError, EngineError, InvalidRequestError
from engine.messages import FinishInfo
from server.config import load_config
from server.pb.slipstream.v1 import admin_pb2 as pb
from server.pb.slipstream.v1 import admin_pb2_grpc as pb_grpc
from server.pb.slipstream.v1 import generation_pb2
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import RunningServer, collect, failure_of, running_server, text_request
from tools.server_process import free_port

STATE = SpeculationState(
    speculators=(SpeculatorState(method="ngram", is_enabled=False, k=2, max_k=4),), default_method="auto"
)
SHOWN = pb.Speculator(method="ngram", enabled=False, num_speculative_tokens=2, max_speculative_tokens=4)


@asynccontextmanager
async def administered(
    engine: FakeEngine | None = None, **options: Any
) -> AsyncIterator[tuple[RunningServer, Any]]:
    """The server and a stub of its admin service."""
    port = free_port()
    async with running_server(engine or FakeEngine(), admin_port=port, **options) as server:
        target, own_connection = f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(target, options=own_connection) as channel:
            yield server, pb_grpc.AdminServiceStub(channel)


async def ask(engine: FakeEngine, call: Any, outcome: AnyResult | EngineError) -> Any:
    """The answer to a call that the engine answers with `outcome`."""
    num_before = len(engine.controls)
    waiting = asyncio.ensure_future(_await(call))
    await engine.wait_for(lambda: len(engine.controls) > num_before)
    engine.answer(outcome)
    return await waiting


async def _await(call: Any) -> Any:
    return await call


async def test_the_admin_service_is_off_by_default_and_not_on_the_service_port() -> None:
    async with running_server() as server:
        assert server.app.ports.admin == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.AdminServiceStub(server.channel).Drain(pb.DrainRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not server.ended.done()


async def test_speculators_are_listed_and_configured() -> None:
    engine = FakeEngine()
    async with administered(engine) as (_, admin):
        listed = await ask(engine, admin.ListSpeculators(pb.ListSpeculatorsRequest()), STATE)
        assert (list(listed.speculators), listed.default_method) == ([SHOWN], "auto")
        request = pb.ConfigureSpeculationRequest(
            speculators=[pb.SpeculatorSettings(method="ngram", enabled=False, num_speculative_tokens=2)],
            default_method="auto",
        )
        configured = await ask(engine, admin.ConfigureSpeculation(request), STATE)
        assert list(configured.speculators) == [SHOWN]
        unset = pb.ConfigureSpeculationRequest(speculators=[pb.SpeculatorSettings(method="ngram")])
        await ask(engine, admin.ConfigureSpeculation(unset), STATE)
        assert list(engine.controls.values()) == [
            GetSpeculation(),
            ConfigureSpeculation(
                changes=(SpeculatorChange(method="ngram", is_enabled=False, k=2),), default_method="auto"
            ),
            ConfigureSpeculation(changes=(SpeculatorChange(method="ngram"),)),
        ]


async def test_what_the_engine_refuses_names_the_field() -> None:
    engine = FakeEngine()
    async with administered(engine) as (_, admin):
        refusal = InvalidRequestError("default_method", "got 'x', expected one of 'ngram'")
        call = admin.ConfigureSpeculation(pb.ConfigureSpeculationRequest(default_method="x"))
        failing = asyncio.ensure_future(failure_of(call))
        await engine.wait_for(lambda: bool(engine.controls))
        engine.answer(refusal)
        failure = await failing
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "default_method")
        twice = [pb.SpeculatorSettings(method="ngram")] * 2
        failure = await failure_of(
            admin.ConfigureSpeculation(pb.ConfigureSpeculationRequest(speculators=twice))
        )
        assert failure.field == "speculators"


async def test_the_log_level_is_set_in_both_processes() -> None:
    engine = FakeEngine()
    before = logging.getLogger().level
    try:
        async with administered(engine) as (_, admin):
            failure = await failure_of(admin.SetLogLevel(pb.SetLogLevelRequest()))
            assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "level")
            assert "expected one of LOG_LEVEL_DEBUG, LOG_LEVEL_INFO" in failure.message
            await ask(engine, admin.SetLogLevel(pb.SetLogLevelRequest(level=pb.LOG_LEVEL_ERROR)), Done())
            assert list(engine.controls.values()) == [SetLogLevel("error")]
            assert logging.getLogger().level == logging.ERROR
    finally:
        logging.getLogger().setLevel(before)


async def test_a_profile_is_told_its_steps_and_tells_its_file() -> None:
    engine = FakeEngine()
    async with administered(engine) as (_, admin):
        written = ProfileWritten("traces/steps-1.json.gz")
        assert (await ask(engine, admin.Profile(pb.ProfileRequest()), written)).path == written.path
        await ask(engine, admin.Profile(pb.ProfileRequest(num_steps=3)), written)
        assert list(engine.controls.values()) == [Profile(10), Profile(3)]


async def test_the_scheduler_s_state_is_shown() -> None:
    engine = FakeEngine()
    request = ScheduledRequestState(
        request_id="alice/r",  # as the engine has it
        tenant="alice",
        status="running",
        priority=-1,
        age=1.5,
        num_prompt_tokens=5,
        num_output_tokens=4,
        num_computed_tokens=8,
        num_in_flight_tokens=3,
        num_cached_tokens=2,
        num_preemptions=1,
        draft_method="ngram",
    )
    state = SchedulerState(
        requests=(request,),
        num_blocks=9,
        num_free_blocks=4,
        num_cached_blocks=3,
        num_preemptions_total=2,
        num_steps_in_flight=1,
    )
    async with administered(engine) as (_, admin):
        shown = await ask(engine, admin.DumpScheduler(pb.DumpSchedulerRequest()), state)
        assert list(engine.controls.values()) == [DumpScheduler()]
    assert shown == pb.DumpSchedulerResponse(
        requests=[
            pb.ScheduledRequest(
                request_id="r",
                tenant="alice",
                status="running",
                priority=-1,
                age=1.5,
                prompt_tokens=5,
                output_tokens=4,
                computed_tokens=8,
                in_flight_tokens=3,
                cached_tokens=2,
                preemptions=1,
                draft_method="ngram",
            )
        ],
        num_blocks=9,
        num_free_blocks=4,
        num_cached_blocks=3,
        num_preemptions_total=2,
        num_steps_in_flight=1,
    )


async def test_draining_twice_is_draining() -> None:
    engine = FakeEngine()
    async with administered(engine) as (server, admin):
        call = server.stub.Generate(text_request(request_id="r"))
        await engine.wait_for_request("r")
        assert (await admin.Drain(pb.DrainRequest())).running_requests == 1
        await server.wait_for_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await admin.Drain(pb.DrainRequest())
        assert (await server.stub.GetLoads(generation_pb2.GetLoadsRequest())).draining
        engine.emit("r", [5], finish=FinishInfo(reason="length"))
        assert (await collect(call))[-1].HasField("finished")
        assert await server.ended == 0


async def test_with_tokens_only_an_administrator_s_will_do(tmp_path: Path) -> None:
    user, administrator = "user-0123456789abcdef", "root-0123456789abcdef"
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        f'[[token]]\ntenant = "user"\nvalue = "{user}"\n'
        f'[[token]]\ntenant = "root"\nvalue = "{administrator}"\nadmin = true\n'
    )
    engine = FakeEngine()
    async with administered(engine, auth_tokens=str(tokens)) as (server, admin):
        for token, code in (
            ("wrong-0123456789abcdef", grpc.StatusCode.UNAUTHENTICATED),
            (user, grpc.StatusCode.PERMISSION_DENIED),
        ):
            metadata = (("authorization", f"Bearer {token}"),)
            assert (await failure_of(admin.Drain(pb.DrainRequest(), metadata=metadata))).code is code
        assert not server.ended.done()
        metadata = (("authorization", f"Bearer {administrator}"),)
        call = admin.ListSpeculators(pb.ListSpeculatorsRequest(), metadata=metadata)
        assert (await ask(engine, call, STATE)).default_method == "auto"


def test_beyond_this_machine_the_admin_service_needs_tokens() -> None:
    options = {"model": "m", "admin_host": "0.0.0.0", "admin_port": 1}
    with pytest.raises(ConfigError, match=r"admin_host: got '0.0.0.0' without auth_tokens"):
        load_config(options)
    assert load_config({**options, "auth_tokens": "tokens.toml"}).admin_port == 1
    assert load_config({**options, "admin_host": "::1"}).admin_port == 1
    assert load_config({**options, "admin_port": 0}).admin_port == 0
