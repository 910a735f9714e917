"""What a server does with three times the load that it can serve.

The frontend is the real one; a scripted engine gives it an exact capacity: so many rows, so many tokens an answer, so
long a step. A: a closed loop that keeps it busy. B: requests at random (Poisson) times, three times as many as it can
serve, of which those are refused whose first token would come later than the server promises. Reported are tokens per
second of completed requests, time to first token of those that were taken, how long a refusal takes, and how late this
client was itself, which is in the times of both.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import Options, compare, interleave, run
from benchmarks.scripted_engine import VOCAB_SIZE
from engine.garbage import spare_what_is_loaded
from server.bench.driver import RequestRecord, connect, run_closed_loop, run_open_loop
from server.bench.load import OutputPlan, complete, poisson_arrivals, random_prompts
from server.bench.schema import BenchResult, LoadReport, Series
from server.bench.statistics import load_report, summarize
from server.pb.slipstream.v1 import generation_pb2 as pb
from tools.server_process import ServerProcess

_ROWS = 16
_STEP_SECONDS = 0.01
_ANSWER = 20  # tokens
_PROMPT = 32
_LIMIT = 0.5  # seconds to the first token that the server promises
_OVERLOAD = 3.0
_CAPACITY = _ROWS / (_ANSWER * _STEP_SECONDS)  # requests a second
_SETTINGS = {
    "--step-seconds": _STEP_SECONDS,
    "--max-num-seqs": _ROWS,
    "--max-time-to-first-token": _LIMIT,
}


class Load:
    """One server and what it was asked so far."""

    def __init__(self, server: ServerProcess, seconds: float, seed: int) -> None:
        self._server = server
        self._seconds = seconds  # of one measurement
        self._seed = seed
        self.overloaded: list[RequestRecord] = []
        self.undisturbed: list[RequestRecord] = []

    def _requests(self, rate: float, seed: int) -> list[pb.GenerateRequest]:
        plan = OutputPlan(output_len=_ANSWER, ignore_eos=True, temperature=0.0, seed=self._seed)
        return complete(random_prompts(int(rate * self._seconds), _PROMPT, VOCAB_SIZE, seed), plan)

    async def at_capacity(self, pair: int) -> float:
        """Goodput of a closed loop with one waiting request for each that runs."""
        num_streams = 2 * _ROWS
        async with connect(self._server.address, num_streams) as stubs:
            requests = self._requests(_CAPACITY, self._seed + 1 + pair)
            records = await run_closed_loop(stubs, requests, num_streams, lambda record: None)
        return self._note(pair, records, self.undisturbed)

    async def over_capacity(self, pair: int) -> float:
        """Goodput of an open loop at three times the capacity."""
        rate = _OVERLOAD * _CAPACITY
        requests = self._requests(rate, self._seed + 1 + pair)
        arrivals = poisson_arrivals(len(requests), rate, self._seed + 1 + pair)
        async with connect(self._server.address, 4 * _ROWS) as stubs:
            records = await run_open_loop(stubs, requests, arrivals, lambda record: None)
        return self._note(pair, records, self.overloaded)

    @staticmethod
    def _note(pair: int, records: list[RequestRecord], kept: list[RequestRecord]) -> float:
        if pair >= 0:  # the first pair warms up
            kept += records
        completed = [record for record in records if record.is_completed]
        seconds = max(record.ended for record in records) - min(record.due for record in records)
        return _ANSWER * len(completed) / seconds


async def benchmark(options: Options) -> BenchResult:
    arguments = [text for flag, value in _SETTINGS.items() for text in (flag, str(value))]
    program = ("-m", "benchmarks.scripted_server")
    spare_what_is_loaded()  # a collection of this client would count as a delay of the server
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ServerProcess(options.model, log, program=program, arguments=arguments) as server:
            load = Load(server, 4.0 if options.quick else 15.0, options.seed)
            values = await interleave(options.num_pairs, load.at_capacity, load.over_capacity)
    refused = [record for record in load.overloaded if record.error == "RESOURCE_EXHAUSTED"]
    refusal = summarize([record.ended - record.due for record in refused])
    lateness = summarize([record.sent - record.due for record in load.overloaded])
    loads: dict[str, LoadReport] = {
        "at capacity": load_report("scripted", load.undisturbed),
        "over capacity": load_report("scripted", load.overloaded),
    }
    first_token = loads["over capacity"].time_to_first_token
    print(
        f"{len(refused)} of {len(load.overloaded)} requests refused, errors {loads['over capacity'].errors}"
    )
    return BenchResult(
        benchmark="overload",
        environment=options.environment(),
        seed=options.seed,
        parameters={
            "rows": _ROWS,
            "step_seconds": _STEP_SECONDS,
            "output_len": _ANSWER,
            "max_time_to_first_token": _LIMIT,
            "capacity_requests_per_second": _CAPACITY,
            "overload": _OVERLOAD,
        },
        loads=loads,
        comparisons=[compare("goodput", "tokens/s", "at capacity", "at 3x", values)],
        series=[
            _percentiles("time to refusal", refusal.p50, refusal.p99, refusal.max),
            _percentiles("time to first token", first_token.p50, first_token.p99, first_token.max),
            _percentiles("client late by", lateness.p50, lateness.p99, lateness.max),
        ],
    )


def _percentiles(name: str, p50: float, p99: float, largest: float) -> Series:
    return Series(name=name, unit="s", x_name="percentile", x=[50.0, 99.0, 100.0], y=[p50, p99, largest])


if __name__ == "__main__":
    run(benchmark, "overload", __doc__)
