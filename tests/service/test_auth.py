"""Bearer tokens: who gets in, on every kind of call, what a token allows, and that its file may change."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine.errors import CallerLimitError, ConfigError
from engine.messages import FinishInfo
from server import callers as callers_module
from server.callers import Caller, read_tokens
from server.limits import CallerLimits
from server.pb.slipstream.v1 import generation_pb2 as pb
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import collect, failure_of, running_server, text_request

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def entry(tenant: str, token: str, more: str = "") -> str:
    return f'[[token]]\ntenant = "{tenant}"\nvalue = "{token}"\n{more}\n'


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("alice", ALICE) + entry("bob", BOB))
    return file


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("wrong-0123456789abcdef"),
        (("authorization", ALICE),),
        bearer(""),
        (("authorization", "Basic x"),),
    ],
)
async def test_a_call_without_a_known_token_is_unauthenticated(tokens: Path, metadata: Any) -> None:
    async with running_server(auth_tokens=str(tokens)) as server:
        for call in (
            server.stub.Generate(text_request(), metadata=metadata),
            server.stub.GenerateOnce(pb.GenerateOnceRequest(request=text_request()), metadata=metadata),
            server.stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata),
            server.stub.Abort(pb.AbortRequest(request_ids=["r"]), metadata=metadata),
            server.stub.GetLoads(pb.GetLoadsRequest(), metadata=metadata),
        ):
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
            assert "0123456789abcdef" not in failure.message
        assert not server.engine.requests
        assert await server.handled("Generate", "UNAUTHENTICATED") == 1


async def test_health_and_reflection_need_no_token(tokens: Path) -> None:
    async with running_server(auth_tokens=str(tokens)) as server:  # which waits for health
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        call.cancel()
        assert "slipstream.v1.GenerationService" in {s.name for s in answer.list_services_response.service}


async def test_a_known_token_gets_in_as_its_tenant_with_a_cache_of_its_own(tokens: Path) -> None:
    async with running_server(auth_tokens=str(tokens)) as server:
        for request_id, token in (("a", ALICE), ("b", BOB)):
            request = text_request(request_id=request_id, cache_salt="mine")
            messages = await collect(server.stub.Generate(request, metadata=bearer(token)))
            assert messages[-1].HasField("finished")
        # Another tenant's name in the salt does not lead into its cache.
        await collect(
            server.stub.Generate(text_request(request_id="c", cache_salt="alice/mine"), metadata=bearer(BOB))
        )
        made = server.engine.requests
        assert {name: (request.tenant, request.cache_salt) for name, request in made.items()} == {
            "alice/a": ("alice", "alice/mine"),
            "bob/b": ("bob", "bob/mine"),
            "bob/c": ("bob", "bob/alice/mine"),
        }


async def test_a_tenant_cannot_abort_another_s_request(tokens: Path) -> None:
    engine = FakeEngine()
    async with running_server(engine, auth_tokens=str(tokens)) as server:
        call = server.stub.Generate(text_request(request_id="r"), metadata=bearer(ALICE))
        await engine.wait_for_request("alice/r")
        abort = pb.AbortRequest(request_ids=["r"])
        answer = await server.stub.Abort(abort, metadata=bearer(BOB))
        assert (list(answer.aborted_request_ids), engine.aborted) == ([], [])
        answer = await server.stub.Abort(abort, metadata=bearer(ALICE))
        assert list(answer.aborted_request_ids) == ["r"]
        assert (await collect(call))[-1].finished.reason == pb.FINISH_REASON_CANCELLED


async def test_tenants_may_choose_the_same_request_id(tokens: Path) -> None:
    engine = FakeEngine()
    async with running_server(engine, auth_tokens=str(tokens)) as server:

        def ask(token: str, request_id: str, n: int = 2) -> Any:
            return server.stub.Generate(text_request(request_id=request_id, n=n), metadata=bearer(token))

        calls = [ask(ALICE, "r"), ask(BOB, "r")]
        await engine.wait_for(lambda: {"alice/r#1", "bob/r#1"} <= set(engine.requests))
        # Neither a name nor the separator in an id leads to another tenant's request, or tells that there is one.
        calls.append(ask(BOB, "alice/r", n=1))
        await engine.wait_for_request("bob/alice/r")
        used = await failure_of(ask(ALICE, "r"))
        assert (used.code, used.field) == (grpc.StatusCode.ALREADY_EXISTS, "request_id")
        assert "got 'r'" in used.message
        abort = pb.AbortRequest(request_ids=["r", "alice/r", "bob/r", "r#1"])
        answer = await server.stub.Abort(abort, metadata=bearer(ALICE))
        assert list(answer.aborted_request_ids) == ["r"]
        assert engine.aborted == ["alice/r", "alice/r#1"]
        ended = await collect(calls[0])
        assert ended[0].started.request_id == "r"
        for call in calls[1:]:
            call.cancel()


async def test_without_a_token_file_everybody_shares_one_cache() -> None:
    async with running_server() as server:
        await collect(server.stub.Generate(text_request(request_id="r", cache_salt="s")))
        assert (server.engine.requests["r"].tenant, server.engine.requests["r"].cache_salt) == ("", "s")


async def test_tokens_are_replaced_while_the_server_runs(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers_module, "SECONDS_BETWEEN_LOOKS", 0.0)
    engine = FakeEngine()
    async with running_server(engine, auth_tokens=str(tokens)) as server:
        running = server.stub.Generate(text_request(request_id="r"), metadata=bearer(ALICE))
        await engine.wait_for_request("alice/r")
        new = "carol-0123456789abcdef"
        replacement = tokens.with_suffix(".new")
        replacement.write_text(entry("carol", new))
        os.replace(replacement, tokens)
        assert (
            await failure_of(server.stub.GetLoads(pb.GetLoadsRequest(), metadata=bearer(ALICE)))
        ).code is (grpc.StatusCode.UNAUTHENTICATED)
        await server.stub.GetLoads(pb.GetLoadsRequest(), metadata=bearer(new))
        engine.emit("alice/r", [5], finish=FinishInfo(reason="length"))  # what runs goes on
        assert (await collect(running))[-1].HasField("finished")
        tokens.write_text("not TOML")
        await server.stub.GetLoads(pb.GetLoadsRequest(), metadata=bearer(new))


async def test_requests_at_once_are_limited_by_token_and_choices_count(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("alice", ALICE, "max_concurrent_requests = 2") + entry("bob", BOB))
    engine = FakeEngine()
    async with running_server(engine, auth_tokens=str(file)) as server:
        first = server.stub.Generate(text_request(request_id="r1"), metadata=bearer(ALICE))
        await engine.wait_for_request("alice/r1")
        refused = await failure_of(server.stub.Generate(text_request(n=2), metadata=bearer(ALICE)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CALLER_LIMIT")
        assert {"RetryInfo", "QuotaFailure"} <= set(refused.details)
        second = server.stub.Generate(text_request(request_id="r2"), metadata=bearer(ALICE))
        other = server.stub.Generate(text_request(request_id="r3", n=3), metadata=bearer(BOB))
        await engine.wait_for(lambda: {"alice/r2", "bob/r3#2"} <= set(engine.requests))
        assert (await failure_of(server.stub.Generate(text_request(), metadata=bearer(ALICE)))).code is (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        first.cancel()
        await engine.wait_for(lambda: "alice/r1" in engine.aborted)
        third = server.stub.Generate(text_request(request_id="r4"), metadata=bearer(ALICE))
        await engine.wait_for_request("alice/r4")
        for call in (second, other, third):
            call.cancel()


async def test_tokens_per_minute_are_limited_by_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("alice", ALICE, "tokens_per_minute = 12") + entry("bob", BOB))
    async with running_server(auth_tokens=str(file)) as server:

        def ask(token: str) -> Any:
            ids = pb.TokenIds(ids=[5, 6, 7, 8])
            return server.stub.Generate(pb.GenerateRequest(token_ids=ids), metadata=bearer(token))

        await collect(ask(ALICE))  # 4 of the prompt, 5 of the answer
        refused = await failure_of(ask(ALICE))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CALLER_LIMIT")
        retry = refused.details["RetryInfo"]
        assert isinstance(retry, error_details_pb2.RetryInfo)
        assert 0 < retry.retry_delay.ToTimedelta().total_seconds() <= 5.0  # one token, at 12 a minute
        await collect(ask(BOB))


def test_a_bucket_fills_steadily_and_a_debt_delays() -> None:
    now = 100.0
    limits = CallerLimits(clock=lambda: now)
    caller = Caller(tenant="a", key="k", tokens_per_minute=60)
    limits.charge_prompt(caller, 60)
    limits.charge_output(caller, 30)
    with pytest.raises(CallerLimitError) as caught:
        limits.charge_prompt(caller, 1)
    assert caught.value.retry_after == 31.0
    now += 31.0
    limits.charge_prompt(caller, 1)
    now += 1000.0
    limits.charge_prompt(
        caller, 600
    )  # more than a minute's worth: a full bucket is enough, and leaves a debt
    with pytest.raises(CallerLimitError) as caught:
        limits.charge_prompt(caller, 1)
    assert caught.value.retry_after == 541.0


def test_what_was_used_while_there_was_no_limit_is_no_debt() -> None:
    limits = CallerLimits(clock=lambda: 100.0)
    limited = Caller(tenant="a", key="k", tokens_per_minute=60)
    limits.charge_prompt(limited, 50)
    limits.charge_prompt(Caller(tenant="a", key="k"), 1_000_000)
    limits.charge_output(Caller(tenant="a", key="k"), 1_000_000)
    limits.charge_prompt(limited, 60)


async def test_the_most_urgent_priority_of_a_token_is_a_bound(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(entry("alice", ALICE, "min_priority = -1"))
    async with running_server(auth_tokens=str(file)) as server:
        await collect(server.stub.Generate(text_request(priority=-1), metadata=bearer(ALICE)))
        failure = await failure_of(server.stub.Generate(text_request(priority=-2), metadata=bearer(ALICE)))
        assert failure.code is grpc.StatusCode.PERMISSION_DENIED
        assert "got -2, expected at least -1" in failure.message


def test_a_file_may_hold_digests_instead_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    digest = hashlib.sha256(ALICE.encode()).hexdigest()
    file.write_text(f'[[token]]\ntenant = "alice"\nsha256 = "{digest}"\nadmin = true\n')
    assert read_tokens(file) == (Caller(tenant="alice", key=digest, min_priority=0, is_admin=True),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[token]]\ntenant = 3", "token.0.tenant: "),
        (entry("a/b", ALICE), "token.0.tenant: "),
        (entry("a", "short-secret"), "at least 16 printable"),
        ('[[token]]\ntenant = "a"\n', "either value or sha256"),
        (entry("a", ALICE, "tokens_per_minute = 0"), "tokens_per_minute: "),
        (entry("a", ALICE, "limit = 1"), "token.0.limit: "),
        (entry("a", ALICE) + entry("b", ALICE), "a token twice"),
        ("", "token: Field required"),
        ("= broken " + ALICE, "cannot read"),
    ],
)
def test_a_wrong_file_is_told_without_quoting_a_token(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_tokens(file)
    assert message in str(caught.value)
    assert ALICE not in str(caught.value)
    assert "short-secret" not in str(caught.value)


def test_every_known_token_is_compared_whichever_is_right(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = callers_module.Callers(tokens)
    compare = callers_module.hmac.compare_digest
    compared: list[str] = []

    def note(ours: str, theirs: str) -> bool:
        compared.append(theirs)
        return compare(ours, theirs)

    monkeypatch.setattr(callers_module.hmac, "compare_digest", note)
    for token in (ALICE, BOB):
        compared.clear()
        callers.authenticate({"authorization": f"bearer {token}"})
        assert len(compared) == 2
