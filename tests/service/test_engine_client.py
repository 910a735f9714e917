"""Both clients behind one interface, against a scripted core: streams, refusals, aborts, failures, stops."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.client.base import EngineClient, RequestStream
from engine.client.inproc import InprocEngineClient
from engine.client.process import ProcessEngineClient
from engine.config import EngineConfig
from engine.control import ConfigureSpeculation, DumpScheduler, GetSpeculation, Profile
from engine.errors import (
    CheckpointError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestIdInUseError,
    SlowReaderError,
)
from engine.messages import LoadProgress, RequestOutput
from engine.stats import StepStats
from tests.support.fake_core import FakeCore, expected_tokens, fake_config, fake_request

ROOT = Path(__file__).parent.parent.parent
ENDLESS = 10_000_000

MakeClient = Callable[..., EngineClient]


@pytest.fixture(params=["inproc", "process"])
def make_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeClient:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the engine process

    def make(config: EngineConfig | None = None, **options: Any) -> EngineClient:
        config = config or fake_config()
        if request.param == "inproc":
            return InprocEngineClient(config, core_factory=FakeCore, **options)
        command = (sys.executable, "-m", "tests.support.fake_engine_main")
        return ProcessEngineClient(config, command=command, **options)

    return make


@asynccontextmanager
async def running(client: EngineClient) -> AsyncIterator[EngineClient]:
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


async def read_all(stream: RequestStream) -> RequestOutput:
    """All outputs, joined by this reader."""
    whole = await stream.next()
    while whole.finish is None:
        output = await stream.next()
        whole.token_ids += output.token_ids
        whole.spec += output.spec
        whole.finish = output.finish
        if output.logprobs is not None:
            whole.logprobs = [*(whole.logprobs or []), *output.logprobs]
    return whole


def output_seen(client: EngineClient, condition: Callable[[RequestOutput], bool]) -> asyncio.Event:
    """Set when the engine sent such an output, whether or not anybody reads it."""
    seen = asyncio.Event()

    def on_step(outputs: list[RequestOutput], step: StepStats | None) -> None:
        if any(map(condition, outputs)):
            seen.set()

    client.on_step(on_step)
    return seen


def is_last(output: RequestOutput) -> bool:
    return output.finish is not None


async def test_tokens_stream_in_order_with_logprobs_and_speculation_counts(make_client: MakeClient) -> None:
    async with running(make_client()) as client:
        request = fake_request("r", 7, logprobs=0)
        output = await read_all(client.submit(request))
    assert output.token_ids == expected_tokens(request)
    assert output.num_prompt_tokens == 3
    assert output.finish is not None
    assert output.finish.reason == "length"
    assert [position.token.token_id for position in output.logprobs or []] == output.token_ids
    assert sum(observation.num_emitted for observation in output.spec) == 8


async def test_progress_and_model_info_are_known_after_start(make_client: MakeClient) -> None:
    client = make_client(fake_config("some/fake-model"))
    progress: list[LoadProgress] = []
    assert not client.is_alive
    with pytest.raises(EngineUnavailableError):
        client.submit(fake_request("early"))
    try:
        await client.start(progress.append)
        assert client.is_alive
        assert client.model_info.model_name == "fake-model"
    finally:
        await client.stop()
    assert not client.is_alive
    # The engine process may have loaded before it knew whom to tell.
    assert {step.phase for step in progress} <= {"weights"}
    assert [step.fraction for step in progress] == sorted(step.fraction for step in progress)


async def test_what_nobody_reads_becomes_one_output(make_client: MakeClient) -> None:
    async with running(make_client()) as client:
        finished = output_seen(client, is_last)
        request = fake_request("r", 101)
        stream = client.submit(request)
        await finished.wait()
        output = await stream.next()
    assert output.token_ids == expected_tokens(request)
    assert output.finish is not None


async def test_a_thousand_requests_at_once(make_client: MakeClient) -> None:
    async with running(make_client(fake_config(max_waiting=2000))) as client:
        requests = [fake_request(f"r{i}", 1 + i % 9, prompt=[i]) for i in range(1000)]
        streams = [client.submit(request) for request in requests]
        outputs = await asyncio.gather(*map(read_all, streams))
        assert [output.token_ids for output in outputs] == [expected_tokens(request) for request in requests]
        assert client.stats.num_running == client.stats.num_waiting == 0


async def test_abort_finishes_live_requests_as_cancelled_and_ignores_others(make_client: MakeClient) -> None:
    async with running(make_client()) as client:
        streams = [client.submit(fake_request(name, ENDLESS)) for name in ("a", "b")]
        for stream in streams:
            await stream.next()
        assert client.abort(["a", "unknown"]) == ["a"]
        output = await read_all(streams[0])
        assert output.finish is not None
        assert output.finish.reason == "cancelled"
        assert client.abort(["a"]) == []
        assert (await streams[1].next()).token_ids
        streams[1].close()


async def test_closing_a_stream_ends_the_request_in_the_engine_and_frees_its_id(
    make_client: MakeClient,
) -> None:
    async with running(make_client()) as client:
        cancelled = output_seen(client, is_last)
        stream = client.submit(fake_request("r", ENDLESS))
        try:
            await stream.next()
        finally:
            stream.close()
        with pytest.raises(RequestIdInUseError):  # until the engine has ended it
            client.submit(fake_request("r"))
        await cancelled.wait()
        request = fake_request("r", 5)
        assert (await read_all(client.submit(request))).token_ids == expected_tokens(request)


async def test_the_id_of_a_live_request_is_refused(make_client: MakeClient) -> None:
    async with running(make_client()) as client:
        stream = client.submit(fake_request("r", ENDLESS))
        with pytest.raises(RequestIdInUseError, match="'r'"):
            client.submit(fake_request("r"))
        stream.close()


async def test_what_the_engine_refuses_reaches_the_stream_as_that_error(make_client: MakeClient) -> None:
    async with running(make_client()) as client:
        with pytest.raises(InvalidRequestError) as invalid:
            await client.submit(fake_request("a", does="refused")).next()
        assert (invalid.value.field, invalid.value.description) == ("prompt", "got what is not liked")
        with pytest.raises(QueueFullError, match="too many wait") as full:
            await client.submit(fake_request("b", does="queue_full")).next()
        assert full.value.retry_after == 2.5
        request = fake_request("a")  # the id is free again
        assert (await read_all(client.submit(request))).token_ids == expected_tokens(request)


async def test_a_queue_that_the_newest_figures_show_full_refuses_at_once(make_client: MakeClient) -> None:
    async with running(make_client(fake_config(max_waiting=2))) as client:
        streams = [client.submit(fake_request(f"r{i}", ENDLESS)) for i in range(3)]
        for stream in streams:
            await stream.next()
        with pytest.raises(QueueFullError, match="2 requests wait, the limit is 2") as full:
            client.submit(fake_request("late"))
        assert full.value.retry_after > 0
        for stream in streams:
            stream.close()


async def test_an_error_of_one_request_leaves_the_others_alone(make_client: MakeClient) -> None:
    async with running(make_client()) as client:
        good = fake_request("good", 20)
        streams = [client.submit(request) for request in (fake_request("bad", 20, does="error"), good)]
        bad_output, good_output = await asyncio.gather(*map(read_all, streams))
    assert bad_output.finish is not None
    assert (bad_output.finish.reason, bad_output.finish.message) == ("error", "the model produced NaN")
    assert good_output.token_ids == expected_tokens(good)


async def test_a_reader_that_does_not_read_is_given_up(make_client: MakeClient) -> None:
    async with running(make_client(slow_reader_timeout=1.0)) as client:
        cancelled = output_seen(client, is_last)
        slow, fast = (client.submit(fake_request(name, ENDLESS)) for name in ("slow", "fast"))

        async def keep_reading() -> None:
            while True:
                await fast.next()

        reading = asyncio.ensure_future(keep_reading())
        await cancelled.wait()
        with pytest.raises(SlowReaderError, match="for 1 s"):
            await slow.next()
        slow.close()
        assert not reading.done()
        reading.cancel()
        fast.close()


async def test_an_exception_in_the_engine_ends_every_stream_and_tells_only_the_log(
    make_client: MakeClient,
) -> None:
    async with running(make_client()) as client:
        others = [client.submit(fake_request(f"r{i}", ENDLESS)) for i in range(3)]
        streams = [*others, client.submit(fake_request("bad", ENDLESS, does="crash"))]
        for stream in streams:
            with pytest.raises(EngineUnavailableError) as caught:
                await read_all(stream)
            assert "secret" not in str(caught.value)
        reason = await client.wait_failed()
        assert str(reason) == "RuntimeError: a secret of the implementation"
        assert not client.is_alive
        with pytest.raises(EngineUnavailableError):
            client.submit(fake_request("late"))
        for stream in streams:
            stream.close()


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("no-checkpoint", CheckpointError, "no such file, expected a directory"),
        ("bug", EngineUnavailableError, "ZeroDivisionError: a secret"),
    ],
)
async def test_a_failure_to_start_is_raised_by_start(
    make_client: MakeClient, model: str, error: type[EngineError], message: str
) -> None:
    client = make_client(fake_config(model))
    with pytest.raises(error, match=message):
        await client.start()
    assert not client.is_alive
    await client.stop()


async def test_stopping_ends_live_streams_as_cancelled_after_what_they_had(make_client: MakeClient) -> None:
    client = make_client()
    await client.start()
    request = fake_request("r", ENDLESS)
    stream = client.submit(request)
    output = await stream.next()
    await asyncio.gather(client.stop(), client.stop())
    rest = await read_all(stream)
    assert rest.finish is not None
    assert rest.finish.reason == "cancelled"
    tokens = output.token_ids + rest.token_ids
    assert tokens == expected_tokens(request, 0, len(tokens))
    await client.stop()


async def test_a_client_that_never_started_can_be_stopped(make_client: MakeClient) -> None:
    client = make_client()
    await client.stop()
    with pytest.raises(EngineUnavailableError):
        await client.start()


async def test_controls_are_answered_in_their_own_time(make_client: MakeClient) -> None:
    async with running(make_client()) as client:
        profiling = asyncio.ensure_future(client.control(Profile(3)))
        assert (await client.control(GetSpeculation())).default_method == "none"
        assert not profiling.done()
        await read_all(client.submit(fake_request("r", 12)))
        assert (await profiling).path == "after step 3"
        with pytest.raises(InvalidRequestError, match="not scripted"):
            await client.control(DumpScheduler())


async def test_a_changed_default_is_told_to_the_frontend(make_client: MakeClient) -> None:
    async with running(make_client()) as client:
        await client.control(ConfigureSpeculation(default_method="auto"))
        while client.model_info.default_speculator != "auto":
            await asyncio.sleep(0)
        assert client.is_alive


async def test_a_control_ends_with_the_engine(make_client: MakeClient) -> None:
    async with running(make_client()) as client:
        profiling = asyncio.ensure_future(client.control(Profile(1_000_000)))
        await client.control(GetSpeculation())
        with pytest.raises(EngineUnavailableError):
            await read_all(client.submit(fake_request("r", ENDLESS, does="crash")))
        with pytest.raises(EngineUnavailableError):
            await profiling
        with pytest.raises(EngineUnavailableError):
            await client.control(GetSpeculation())
