"""How many tokens and messages a second the frontend serves, with an engine that costs nothing.

The frontend is the real one in a process of its own, with the tokenizer of the model. The load generator
shares the machine with it, so the rates by the frontend's own CPU time are reported too: they depend on
nobody else.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from benchmarks.common import Options, run
from benchmarks.scripted_engine import STEP_SECONDS, VOCAB_SIZE
from server.bench.driver import connect, run_closed_loop
from server.bench.load import OutputPlan, complete, random_prompts
from server.bench.schema import BenchResult, LoadReport, Series
from server.bench.statistics import load_report
from tools.server_process import ServerProcess

_STREAMS = (1, 64, 256)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    server: ServerProcess, num_streams: int, output_len: int, seed: int
) -> tuple[LoadReport, float]:
    """Each stream answers two requests; returns the report and the CPU seconds of the frontend."""
    plan = OutputPlan(output_len=output_len, ignore_eos=True, temperature=0.0, seed=seed)
    async with connect(server.address, num_streams) as stubs:
        warmup = complete(random_prompts(num_streams, 32, VOCAB_SIZE, seed), plan)
        await run_closed_loop(stubs, warmup, num_streams, lambda record: None)
        requests = complete(random_prompts(2 * num_streams, 32, VOCAB_SIZE, seed + 1), plan)
        before = cpu_seconds(server.pid)
        records = await run_closed_loop(stubs, requests, num_streams, lambda record: None)
        return load_report("scripted", records), cpu_seconds(server.pid) - before


async def benchmark(options: Options) -> BenchResult:
    output_len = 128 if options.quick else 512
    loads: dict[str, LoadReport] = {}
    tokens: list[float] = []
    messages: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        program, rows = ("-m", "benchmarks.scripted_server"), ("--max-num-seqs", str(max(_STREAMS)))
        with ServerProcess(options.model, log, program=program, arguments=rows) as server:
            for num_streams in _STREAMS:
                report, seconds = await measure(server, num_streams, output_len, options.seed)
                loads[f"{num_streams} streams"] = report
                tokens.append(report.completion_tokens / seconds)
                messages.append(report.num_messages / seconds)
                print(
                    f"{num_streams} streams: {report.tokens_per_second:.0f} tokens/s, "
                    f"{report.messages_per_second:.0f} messages/s"
                )
    streams = [float(num_streams) for num_streams in _STREAMS]
    return BenchResult(
        benchmark="frontend_rate",
        environment=options.environment(),
        seed=options.seed,
        parameters={"output_len": output_len, "engine_step_seconds": STEP_SECONDS},
        loads=loads,
        series=[
            Series(name="tokens", unit="per CPU second", x_name="streams", x=streams, y=tokens),
            Series(name="messages", unit="per CPU second", x_name="streams", x=streams, y=messages),
        ],
    )


if __name__ == "__main__":
    run(benchmark, "frontend_rate", __doc__)
