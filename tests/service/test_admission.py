"""What is refused before it waits in vain: a full queue, a tenant's share of it, a first token that comes too late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import grpc
import pytest
from google.rpc import error_details_pb2

from engine.errors import InvalidRequestError, LateError, QueueFullError
from engine.messages import AddRequest, RequestOutput, RequestTimes
from engine.params import SamplingParams
from engine.stats import EngineStats, StepStats
from server.admission import Admission
from server.wait_estimate import WaitEstimator
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixture import Failure, collect, failure_of, running_server, text_request


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """An admission in front of an engine that takes up the requests that it is told to."""

    def __init__(self, *, max_waiting: int = 100, max_running: int = 4, limit: float | None = None) -> None:
        self.clock = Clock()
        self.stats = EngineStats(num_running=max_running)
        self.admission = Admission(
            lambda: self.stats,
            max_waiting=max_waiting,
            max_running=max_running,
            max_time_to_first_token=limit,
            clock=self.clock,
        )
        self._blocks: list[AbstractContextManager[None]] = []
        self._num_sent = 0

    def send(self, count: int, *, tenant: str = "", priority: int = 0, length: int = 10) -> list[str]:
        """Requests that wait from now on."""
        requests = [
            AddRequest(
                request_id=f"r{self._num_sent + i}",
                prompt_token_ids=[1] * length,
                params=SamplingParams(max_tokens=1),
                tenant=tenant,
                priority=priority,
            )
            for i in range(count)
        ]
        self._num_sent += count
        block = self.admission.waiting(requests)
        block.__enter__()
        self._blocks.append(block)
        self.stats.num_waiting += count
        return [request.request_id for request in requests]

    def leave(self) -> None:
        """Nobody waits any more."""
        for block in self._blocks:
            block.__exit__(None, None, None)
        self.stats.num_waiting = 0

    def start(self, request_ids: list[str], *, seconds: float, length: int = 10) -> None:
        """A step of so many seconds took them up."""
        self.clock.now += seconds
        self.stats.num_waiting -= len(request_ids)
        times = RequestTimes(arrival=1.0, first_scheduled=2.0)
        outputs = [
            RequestOutput(request_id=request_id, num_prompt_tokens=length, times=times)
            for request_id in request_ids
        ]
        self.admission.on_step(outputs, StepStats())

    def learn(self, *, per_second: int, length: int = 10) -> None:
        """Ten seconds of a queue that moves at this rate."""
        for _ in range(10):
            names = self.send(per_second, length=length)
            self.send(1)
            self.start([], seconds=0.0)
            self.start(names, seconds=1.0, length=length)

    def check(
        self,
        tenant: str = "",
        priority: int = 0,
        *,
        num_choices: int = 1,
        num_tokens: int = 0,
        within: float | None = None,
    ) -> None:
        deadline = None if within is None else self.clock.now + within
        self.admission.check(
            tenant, priority, num_choices=num_choices, num_tokens=num_tokens, deadline=deadline
        )


@pytest.fixture
def learnt() -> Iterator[World]:
    """Ten requests of ten tokens start a second; ten wait, of nobody in particular."""
    world = World()
    world.learn(per_second=10)
    return iter([world])


def test_while_nothing_is_known_everything_is_taken() -> None:
    world = World(limit=0.5)
    world.send(50)
    world.check(within=0.001)


def test_a_request_that_would_be_late_is_refused_with_the_time_to_wait(learnt: Iterator[World]) -> None:
    world = next(learnt)  # ten wait: the next one starts in about 1.1 seconds
    assert world.admission.estimate() == pytest.approx(1.1, rel=0.05)
    world.check(within=1.3)
    with pytest.raises(LateError, match=r"would come in 1\.1 s, wanted within 0\.3 s") as caught:
        world.check(within=0.3)
    assert caught.value.retry_after == pytest.approx(0.8, rel=0.1)
    world.check()  # without a deadline it may take as long as it takes


def test_the_server_s_own_promise_bounds_the_wait_of_all() -> None:
    world = World(limit=0.5)
    world.learn(per_second=10)
    for within in (None, 100.0):
        with pytest.raises(LateError):
            world.check(within=within)


def test_while_rows_are_free_prompts_decide() -> None:
    world = World(max_running=64)
    world.stats.num_running = 1
    world.learn(per_second=10, length=100)  # a thousand prompt tokens a second; ten of ten tokens wait
    assert world.admission.estimate(num_tokens=2000) == pytest.approx(2.1, rel=0.05)
    with pytest.raises(LateError):
        world.check(num_tokens=2000, within=1.0)
    world.check(num_tokens=20, within=1.0)


def test_answers_that_took_long_say_nothing_of_how_fast_prompts_are_computed() -> None:
    """An idle engine would refuse every long prompt, for ever: what it refuses cannot teach it better."""
    world = World(max_running=4)
    for _ in range(20):  # all rows are taken for a minute each time, then four prompts start at once
        names = world.send(4)
        world.send(1)
        world.start([], seconds=0.0)
        world.start(names, seconds=60.0)
    with pytest.raises(LateError):
        world.check(within=30.0)
    world.leave()
    world.stats.num_running = 0
    world.check(num_tokens=100_000, within=0.1)
    world.send(2)  # that came in the same moment
    world.check(num_tokens=1000, within=0.1)


def test_more_requests_than_free_rows_wait_until_running_ones_end(learnt: Iterator[World]) -> None:
    world = next(learnt)
    world.stats.num_running = 1  # of four; ten wait
    assert world.admission.estimate() == pytest.approx(0.8, rel=0.05)


def test_who_needs_no_queue_is_not_judged_by_one() -> None:
    world = World(max_running=64)
    world.stats.num_running = 1
    world.learn(per_second=10, length=100)  # a thousand prompt tokens a second
    world.leave()
    world.check(num_tokens=5000, within=1.0)
    world.send(1)
    with pytest.raises(LateError):
        world.check(num_tokens=5000, within=1.0)


def test_an_outage_of_the_engine_is_no_waiting_in_the_queue(learnt: Iterator[World]) -> None:
    world = next(learnt)
    world.start([], seconds=0.0)  # requests wait, and the engine dies
    world.clock.now += 60.0
    world.admission.engine_started()
    world.start([], seconds=1.0)
    assert world.admission.estimate() == pytest.approx(1.1, rel=0.05)


def test_more_urgent_requests_wait_for_more_urgent_ones_only(learnt: Iterator[World]) -> None:
    world = next(learnt)
    world.check(priority=-1, within=0.3)
    with pytest.raises(LateError):
        world.check(priority=1, within=0.3)


def test_a_tenant_waits_for_its_own_and_as_many_of_each_other(learnt: Iterator[World]) -> None:
    world = next(learnt)
    world.send(30, tenant="heavy")
    estimate = world.admission.estimate
    assert estimate("light") == pytest.approx(0.3, rel=0.1)  # one of "heavy", one of nobody, itself
    assert estimate("heavy") == pytest.approx(4.1, rel=0.1)


def test_requests_that_leave_do_not_count_any_more() -> None:
    world = World(max_waiting=3)
    request = AddRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(max_tokens=1))
    world.send(2)
    with world.admission.waiting([request]), pytest.raises(QueueFullError, match="3 requests wait"):
        world.check()
    world.check()


def test_a_tenant_never_fills_the_queue_and_a_newcomer_finds_room() -> None:
    world = World(max_waiting=8)
    for _ in range(4):
        world.check("heavy")
        world.send(1, tenant="heavy")
    with pytest.raises(QueueFullError, match="4 requests of this tenant wait, and 4 places"):
        world.check("heavy")
    for _ in range(2):
        world.check("light")
        world.send(1, tenant="light")
    with pytest.raises(QueueFullError):
        world.check("light")
    world.check("third")


def test_there_is_room_for_all_choices_of_a_request_or_it_is_refused() -> None:
    world = World(max_waiting=8)
    world.check(num_choices=8)
    world.send(3)
    world.check(num_choices=5)
    with pytest.raises(QueueFullError, match="got 6 choices while 3 requests wait, the limit is 8"):
        world.check(num_choices=6)


def has_room(world: World, tenant: str) -> bool:
    try:
        world.check(tenant)
    except QueueFullError:
        return False
    return True


@pytest.mark.parametrize("limit", range(1, 12))
def test_choices_take_the_places_that_as_many_requests_would(limit: int) -> None:
    """Of a tenant: so many that a newcomer finds room."""
    for num_before in range(limit):
        one_by_one, at_once = World(max_waiting=limit), World(max_waiting=limit)
        one_by_one.send(num_before, tenant="other")
        at_once.send(num_before, tenant="other")
        num_taken = 0
        while has_room(one_by_one, "heavy"):
            one_by_one.send(1, tenant="heavy")
            num_taken += 1
        if num_taken:
            at_once.check("heavy", num_choices=num_taken)
        with pytest.raises((QueueFullError, InvalidRequestError)):
            at_once.check("heavy", num_choices=num_taken + 1)


@pytest.mark.parametrize(("tenant", "most"), [("", 7), ("heavy", 4)])
def test_more_choices_than_may_ever_wait_are_no_matter_of_trying_again(tenant: str, most: int) -> None:
    world = World(max_waiting=7)
    world.check(tenant, num_choices=most)
    with pytest.raises(InvalidRequestError, match=rf"n: got {most + 1}, expected 1\.\.{most}"):
        world.check(tenant, num_choices=most + 1)


def test_an_estimate_follows_a_change_of_speed() -> None:
    estimator, now = WaitEstimator(max_running=1), 0.0
    for per_second in (10, 1, 10):
        for _ in range(60):
            now += 1.0
            estimator.observe(
                now, num_running=1, has_waiting=True, num_started=per_second, num_prompt_tokens=per_second
            )
        seconds = estimator.estimate(num_running=1, num_ahead=10, num_tokens_ahead=0)
        assert seconds == pytest.approx(10 / per_second, rel=0.2)


def test_a_slow_engine_is_remembered_for_as_long_as_it_takes() -> None:
    estimator = WaitEstimator(max_running=1)
    for second in range(601):
        started = int(second % 60 == 0)
        estimator.observe(
            float(second), num_running=1, has_waiting=True, num_started=started, num_prompt_tokens=started
        )
    seconds = estimator.estimate(num_running=1, num_ahead=2, num_tokens_ahead=0)
    assert seconds == pytest.approx(120.0, rel=0.15)


def test_times_without_a_queue_say_nothing() -> None:
    estimator = WaitEstimator(max_running=1)
    for second in range(100):
        estimator.observe(float(second), num_running=1, has_waiting=False, num_started=1, num_prompt_tokens=1)
    assert estimator.estimate(num_running=1, num_ahead=10, num_tokens_ahead=10) == 0.0


# ---- in the server -----------------------------------------------------------------------------------------


def retry_seconds(failure: Failure) -> float:
    retry = failure.details["RetryInfo"]
    assert isinstance(retry, error_details_pb2.RetryInfo)
    return retry.retry_delay.ToTimedelta().total_seconds()


async def test_a_call_whose_deadline_is_too_near_is_refused_before_it_reaches_the_engine() -> None:
    engine = FakeEngine()
    async with running_server(engine, max_num_seqs=1) as server:
        waiting = [server.stub.Generate(text_request(request_id=f"w{i}")) for i in range(4)]
        await engine.wait_for(lambda: len(engine.requests) == 4)
        estimate = 0.0
        while estimate < 2.5:  # the queue is seen not to move
            engine.step(stats=EngineStats(num_running=1, num_waiting=4), step=StepStats())
            await server.is_serving()
            estimate = server.metric("slipstream_estimated_time_to_first_token", model="tiny") or 0.0
        failure = await failure_of(server.stub.Generate(text_request(request_id="late"), timeout=2.0))
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_LATE")
        assert 0 < retry_seconds(failure) <= 60
        assert "late" not in engine.requests
        assert server.metric("slipstream_requests_rejected_total", model="tiny", reason="too_late") == 1
        patient = server.stub.Generate(text_request(request_id="patient"), timeout=200.0)
        await engine.wait_for_request("patient")
        for call in (*waiting, patient):
            call.cancel()


async def test_a_full_queue_is_refused_with_retry_info() -> None:
    engine = FakeEngine()
    async with running_server(engine, max_waiting=2) as server:
        calls = [server.stub.Generate(text_request(request_id=f"w{i}")) for i in range(2)]
        await engine.wait_for(lambda: len(engine.requests) == 2)
        failure = await failure_of(server.stub.Generate(text_request()))
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert retry_seconds(failure) == 1.0
        engine.emit("w0", [5])  # starts, so it waits no longer
        admitted = server.stub.Generate(text_request(request_id="w2"))
        await engine.wait_for_request("w2")
        for call in (*calls, admitted):
            call.cancel()


async def test_a_prompt_beyond_the_server_s_own_limit_is_refused() -> None:
    async with running_server(max_prompt_tokens=2) as server:
        await collect(server.stub.Generate(text_request("the dog")))
        failure = await failure_of(server.stub.Generate(text_request("the dog the dog")))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "text")
        assert "expected 1..2: the limit of this server" in failure.message


def test_a_few_starts_do_not_say_how_fast_prompts_are_computed() -> None:
    """A server that has just started: a quarter of a second, in which no prompt or a short one was computed."""
    estimator = WaitEstimator(max_running=64)
    for step, (started, tokens) in enumerate(((0, 0), (0, 0), (1, 5))):
        estimator.observe(
            0.15 * step, num_running=2, has_waiting=True, num_started=started, num_prompt_tokens=tokens
        )
        assert estimator.estimate(num_running=2, num_ahead=3, num_tokens_ahead=1400) < 1.0
    for step in range(3, 13):
        estimator.observe(0.15 * step, num_running=2, has_waiting=True, num_started=1, num_prompt_tokens=100)
    seconds = estimator.estimate(num_running=2, num_ahead=3, num_tokens_ahead=1400)
    assert seconds == pytest.approx(1400 * 1.8 / 1005, rel=0.1)
