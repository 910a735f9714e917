"""A chaos run: every question undisturbed, then all of them at random times with disturbances while the engine is
killed again and again, then whether everything is as it was.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from server.bench.environment import current_environment
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.chaos.client import Outcome, send
from tools.chaos.outages import Outage, kill_again_and_again, wait_for_readiness
from tools.chaos.plan import Attempt, attempts, questions
from tools.chaos.report import ChaosReport
from tools.chaos.verdict import Answer, fault_of
from tools.server_log import errors_in_log
from tools.server_process import ServerProcess
from tools.server_state import OWN_CONNECTION, held_when_idle, leaks, resident_bytes

SLOW_READER_TIMEOUT = 2.0  # seconds
SERVER_ARGUMENTS = (
    *("--num-threads", "1", "--max-num-seqs", "16", "--block-size", "8", "--kv-cache-memory", "1MiB"),
    *("--speculator", "ngram,k=4", "--speculator", "suffix,k=4", "--draft-policy", "auto"),
    *(
        "--slow-reader-timeout",
        str(SLOW_READER_TIMEOUT),
        "--engine-restarts",
        "1000000",
        "--log-format",
        "json",
    ),
)
_CONCURRENCY = 8  # of the undisturbed run
_MEMORY_SAMPLES = 20
_MAX_DESCRIBED = 20
_EXPECTED_ERRORS = ("engine died, starting another", "the engine is gone")
_SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))


@dataclass(frozen=True)
class Settings:
    """Of one run."""

    seconds: float
    rate: float  # requests a second
    kill_every: float  # seconds of service between two kills
    num_questions: int
    seed: int


@dataclass(frozen=True)
class _Stubs:
    usual: pb_grpc.GenerationServiceStub
    slow: pb_grpc.GenerationServiceStub  # of a connection that takes little unread


async def run(server: ServerProcess, settings: Settings) -> ChaosReport:
    """The server was started with SERVER_ARGUMENTS."""
    asked = questions(settings.num_questions, settings.seed)
    answers = await _undisturbed(server.address, asked)
    before = await held_when_idle(server)
    outages: list[Outage] = []
    samples: list[int] = []
    async with (
        _meanwhile(kill_again_and_again(server, settings.kill_every, outages)),
        _meanwhile(_sample_memory(server.pid, settings.seconds / _MEMORY_SAMPLES, samples)),
    ):
        outcomes = await _disturbed(server.address, asked, settings)
    await wait_for_readiness(server.address, True)
    is_same_again = await _undisturbed(server.address, asked) == answers
    after = await held_when_idle(server, before)
    faults = [
        f"{outcome.attempt.disturbance}, question {outcome.attempt.question}: {fault}"
        for outcome in outcomes
        if (fault := fault_of(outcome, answers[outcome.attempt.question], outages)) is not None
    ]
    faults += leaks(before, after)
    if not is_same_again:
        faults.append("the answers after the run differ from those before it")
    faults += errors_in_log(server.log_path, expected=_EXPECTED_ERRORS)
    return ChaosReport(
        environment=current_environment(device="cpu", num_threads=1),
        seed=settings.seed,
        seconds=settings.seconds,
        rate=settings.rate,
        num_requests=len(outcomes),
        disturbances=_counted(outcome.attempt.disturbance for outcome in outcomes),
        statuses=_counted(
            f"{outcome.attempt.disturbance}: {outcome.status} {outcome.reason}".strip()
            for outcome in outcomes
        ),
        outage_seconds=[round(outage.ended - outage.began, 3) for outage in outages],
        before=before,
        after=after,
        bytes_meanwhile=samples,
        num_faults=len(faults),
        faults=faults[:_MAX_DESCRIBED],
    )


async def _undisturbed(address: str, asked: Sequence[pb.GenerateRequest]) -> list[Answer]:
    """One after the other in each of a few streams."""
    answers: dict[int, Answer] = {}
    remaining = iter(range(len(asked)))

    async def ask(stub: pb_grpc.GenerationServiceStub) -> None:
        for i in remaining:
            outcome = await send(stub, asked[i], Attempt(0.0, i, "none"), f"undisturbed-{i}")
            if outcome.status != "OK" or outcome.has_given_up:
                raise RuntimeError(f"question {i}: got {outcome.status} in the undisturbed run, expected OK")
            answers[i] = Answer(outcome.tokens, outcome.texts, outcome.finished)

    async with _connect(address) as stubs, asyncio.TaskGroup() as group:
        for _ in range(_CONCURRENCY):
            group.create_task(ask(stubs.usual))
    return [answers[i] for i in range(len(asked))]


async def _disturbed(address: str, asked: Sequence[pb.GenerateRequest], settings: Settings) -> list[Outcome]:
    """An open loop: every request is sent at its time, whatever has become of the others."""
    plan = attempts(
        settings.num_questions, settings.rate, settings.seconds, SLOW_READER_TIMEOUT, settings.seed
    )
    start = time.monotonic()

    async def at_its_time(stubs: _Stubs, i: int, attempt: Attempt) -> Outcome:
        await asyncio.sleep(start + attempt.due - time.monotonic())
        stub = stubs.slow if attempt.disturbance == "slow" else stubs.usual
        return await send(stub, asked[attempt.question], attempt, f"chaos-{i}")

    async with _connect(address) as stubs, asyncio.TaskGroup() as group:
        tasks = [group.create_task(at_its_time(stubs, i, attempt)) for i, attempt in enumerate(plan)]
    return [task.result() for task in tasks]


async def _sample_memory(pid: int, every: float, samples: list[int]) -> None:
    while True:
        samples.append(resident_bytes(pid))
        await asyncio.sleep(every)


@asynccontextmanager
async def _connect(address: str) -> AsyncIterator[_Stubs]:
    async with (
        grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as usual,
        grpc.aio.insecure_channel(address, options=(*OWN_CONNECTION, *_SMALL_WINDOW)) as slow,
    ):
        yield _Stubs(pb_grpc.GenerationServiceStub(usual), pb_grpc.GenerationServiceStub(slow))


@asynccontextmanager
async def _meanwhile(endless: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs beside the block and is cancelled at its end; raises what it died of."""
    task = asyncio.create_task(endless)
    try:
        yield
    finally:
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
    if not isinstance(result, asyncio.CancelledError) and result is not None:
        raise result


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))
