"""Three times the load that an engine can serve, on a simulated clock: what is taken is served in time, and the engine
stays busy. The same on a real clock is benchmarks/overload.py.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from engine.errors import LateError
from engine.messages import AddRequest, RequestOutput, RequestTimes
from engine.params import SamplingParams
from engine.stats import EngineStats, StepStats
from server.admission import Admission

SECONDS = 60.0
LIMIT = 0.5  # seconds to the first token


@dataclass
class Job:
    request: AddRequest
    arrival: float
    num_left: int  # tokens of the answer
    num_prompt_left: int
    admitted: ExitStack = field(default_factory=ExitStack)


@dataclass
class Engine:
    """Rows that decode a token a step, and prompts that are computed in front of them, so many tokens a step."""

    num_rows: int
    step_seconds: float
    prompt_tokens_per_step: int
    now: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    first_token_after: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.running), num_waiting=len(self.waiting))

    def step(self) -> list[RequestOutput]:
        """Outputs of the requests that started."""
        self.now += self.step_seconds
        outputs, budget = [], self.prompt_tokens_per_step
        while self.waiting and len(self.running) < self.num_rows and budget > 0:
            job = self.waiting[0]
            part = min(budget, job.num_prompt_left)
            budget -= part
            job.num_prompt_left -= part
            if job.num_prompt_left:
                break
            self.running.append(self.waiting.popleft())
            self.first_token_after.append(self.now - job.arrival)
            times = RequestTimes(arrival=job.arrival, first_scheduled=self.now)
            num_prompt_tokens = len(job.request.prompt_token_ids)
            outputs.append(
                RequestOutput(
                    request_id=job.request.request_id, num_prompt_tokens=num_prompt_tokens, times=times
                )
            )
        for job in self.running:
            job.num_left -= 1
            self.num_tokens += 1
        self.running = [job for job in self.running if job.num_left > 0]
        return outputs


def simulate(engine: Engine, rate: float, make: Callable[[random.Random], tuple[int, int]]) -> int:
    """Poisson arrivals; `make` draws lengths of prompt and answer. Returns how many were refused."""
    generator = random.Random(0)
    admission = Admission(
        engine.stats,
        max_waiting=10_000,
        max_running=engine.num_rows,
        max_time_to_first_token=LIMIT,
        clock=lambda: engine.now,
    )
    num_refused, next_arrival, count = 0, 0.0, 0
    while engine.now < SECONDS:
        for output in (outputs := engine.step()):
            assert output.times.first_scheduled
        admission.on_step(outputs, StepStats())
        while next_arrival <= engine.now:
            prompt, answer = make(generator)
            try:
                admission.check("", 0, num_choices=1, num_tokens=prompt, deadline=None)
            except LateError:
                num_refused += 1
            else:
                request = AddRequest(
                    request_id=f"r{count}",
                    prompt_token_ids=[0] * prompt,
                    params=SamplingParams(max_tokens=answer),
                )
                job = Job(request, next_arrival, answer, prompt)
                job.admitted.enter_context(admission.waiting([request]))
                engine.waiting.append(job)
            count += 1
            next_arrival += generator.expovariate(rate)
    return num_refused


@pytest.mark.parametrize(
    ("engine", "capacity", "make"),
    [
        pytest.param(Engine(16, 0.01, 10_000), 80.0, lambda generator: (32, 20), id="rows"),
        pytest.param(
            Engine(16, 0.01, 10_000),
            80.0,
            lambda generator: (generator.randrange(1, 64), generator.choice([2, 10, 48])),
            id="rows, mixed answers",
        ),
        pytest.param(Engine(256, 0.02, 64), 32.0, lambda generator: (100, 4), id="prompts"),
        pytest.param(
            Engine(256, 0.02, 64),
            32.0,
            lambda generator: (generator.choice([10, 50, 240]), 4),
            id="prompts, mixed",
        ),
    ],
)
def test_at_three_times_the_capacity_goodput_holds_and_waits_are_bounded(
    engine: Engine, capacity: float, make: Callable[[random.Random], tuple[int, int]]
) -> None:
    num_refused = simulate(engine, 3.0 * capacity, make)
    num_served = len(engine.first_token_after)
    assert num_served > 0.9 * capacity * SECONDS
    assert num_refused > capacity * SECONDS
    late = sorted(engine.first_token_after)[int(0.99 * num_served)]
    assert late < 1.7 * LIMIT
    assert sorted(engine.first_token_after)[num_served // 2] < 1.1 * LIMIT


def test_at_half_the_capacity_nothing_is_refused() -> None:
    engine = Engine(16, 0.01, 10_000)
    assert simulate(engine, 40.0, lambda generator: (32, 20)) == 0
