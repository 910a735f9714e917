"""Unread outputs become one; a stream ends once, by `finish`, by an error, or because its reader left."""

from __future__ import annotations

import asyncio

import pytest

from engine.client.stream import MergingStream
from engine.errors import EngineUnavailableError, SlowReaderError
from engine.messages import FinishInfo, PositionLogprobs, RequestOutput, RequestTimes, TokenLogprob
from engine.stats import SpecObservation


def output(*token_ids: int, finish: FinishInfo | None = None) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=list(token_ids), finish=finish)


def stream() -> tuple[MergingStream, list[str]]:
    closed: list[str] = []
    return MergingStream("r", lambda: closed.append("r")), closed


async def test_deltas_join_and_totals_are_the_newest() -> None:
    subject, _ = stream()
    observations = [
        SpecObservation(method="m", num_drafted=1, num_verifier_accepted=1, num_accepted=1, num_emitted=i)
        for i in (1, 2)
    ]
    positions = [PositionLogprobs(TokenLogprob(i, -1.0, 1), []) for i in range(3)]
    prompt_logprobs = [None, positions[0]]
    finish = FinishInfo(reason="length")
    subject.put(
        RequestOutput(
            request_id="r",
            token_ids=[1, 2],
            logprobs=positions[:2],
            prompt_logprobs=prompt_logprobs,
            num_prompt_tokens=2,
            spec=observations[:1],
        ),
        now=0.0,
    )
    subject.put(
        RequestOutput(
            request_id="r",
            token_ids=[3],
            logprobs=positions[2:],
            num_prompt_tokens=2,
            num_cached_tokens=1,
            num_preemptions=4,
            spec=observations[1:],
            times=RequestTimes(last_token=5.0),
            finish=finish,
        ),
        now=1.0,
    )
    assert await subject.next() == RequestOutput(
        request_id="r",
        token_ids=[1, 2, 3],
        logprobs=positions,
        prompt_logprobs=prompt_logprobs,
        num_prompt_tokens=2,
        num_cached_tokens=1,
        num_preemptions=4,
        spec=observations,
        times=RequestTimes(last_token=5.0),
        finish=finish,
    )


async def test_logprobs_stay_absent_where_there_are_none() -> None:
    subject, _ = stream()
    subject.put(output(1), 0.0)
    subject.put(output(2), 0.0)
    assert (await subject.next()).logprobs is None


async def test_a_waiting_reader_gets_each_output_as_it_comes() -> None:
    subject, _ = stream()
    for token_id in range(3):
        reading = asyncio.ensure_future(subject.next())
        await asyncio.sleep(0)
        assert not reading.done()
        subject.put(output(token_id), 0.0)
        assert (await reading).token_ids == [token_id]


async def test_an_error_comes_after_what_is_unread() -> None:
    subject, _ = stream()
    subject.put(output(1), 0.0)
    subject.fail(EngineUnavailableError("gone"))
    assert (await subject.next()).token_ids == [1]
    for _ in range(2):
        with pytest.raises(EngineUnavailableError, match="gone"):
            await subject.next()


async def test_an_error_wakes_a_waiting_reader() -> None:
    subject, _ = stream()
    reading = asyncio.ensure_future(subject.next())
    await asyncio.sleep(0)
    subject.fail(EngineUnavailableError("gone"))
    with pytest.raises(EngineUnavailableError):
        await reading


async def test_a_reader_that_was_given_up_gets_the_error_and_not_what_it_had_left_unread() -> None:
    subject, closed = stream()
    subject.put(output(1), 0.0)
    subject.give_up(SlowReaderError("too slow"))
    subject.put(output(2), 1.0)
    with pytest.raises(SlowReaderError):
        await subject.next()
    subject.close()
    assert closed == []


async def test_unread_time_counts_from_the_oldest_unread_output_while_the_request_runs() -> None:
    subject, _ = stream()
    assert subject.unread_seconds(100.0) == 0.0
    subject.put(output(1), 10.0)
    subject.put(output(2), 14.0)
    assert subject.unread_seconds(15.0) == 5.0
    await subject.next()
    assert subject.unread_seconds(100.0) == 0.0
    subject.put(output(3, finish=FinishInfo(reason="length")), 20.0)
    assert subject.unread_seconds(100.0) == 0.0


async def test_closing_ends_a_running_request_once_and_a_finished_one_never() -> None:
    running, closed = stream()
    running.put(output(1), 0.0)
    running.close()
    running.close()
    assert closed == ["r"]
    finished, closed = stream()
    finished.put(output(1, finish=FinishInfo(reason="length")), 0.0)
    finished.close()
    assert closed == []
