"""Whether memory stays flat: resident bytes and free KV blocks over many short requests to a tiny model.

Through the real server. Resident memory is that of all its processes, read while nothing runs.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from benchmarks.common import Options, run
from server.bench.driver import connect, run_closed_loop
from server.bench.load import OutputPlan, complete, random_prompts
from server.bench.schema import BenchResult, Series
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tests.support.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer
from tools.server_process import ServerProcess, descendants

_CONCURRENCY = 16


def resident_bytes(pid: int) -> int:
    """Of a process and all its descendants."""
    total = 0
    for process in (pid, *descendants(pid)):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) * 1024
    return total


async def idle_loads(stub: pb_grpc.GenerationServiceStub) -> pb.GetLoadsResponse:
    """The load once nothing runs any more."""
    loads: pb.GetLoadsResponse = await stub.GetLoads(pb.GetLoadsRequest())
    while loads.running_requests:
        await asyncio.sleep(0.05)
        loads = await stub.GetLoads(pb.GetLoadsRequest())
    return loads


async def watch(options: Options, server: ServerProcess, num_requests: int, interval: int) -> list[Series]:
    """Send all requests; after every `interval` of them, look at the idle server."""
    done: list[float] = []
    memory: list[float] = []
    free_blocks: list[float] = []
    async with connect(server.address, _CONCURRENCY) as stubs:
        info = await stubs[0].GetModelInfo(pb.GetModelInfoRequest())
        for start in range(0, num_requests, interval):
            seed = options.seed * num_requests + start
            plan = OutputPlan(output_len=8, ignore_eos=True, temperature=1.0, seed=seed)
            requests = complete(random_prompts(interval, 24, info.vocab_size, seed), plan)
            records = await run_closed_loop(stubs, requests, _CONCURRENCY, lambda record: None)
            assert all(record.is_completed for record in records), "a request failed"
            loads = await idle_loads(stubs[0])
            done.append(start + interval)
            memory.append(resident_bytes(server.pid))
            free_blocks.append(loads.free_blocks)
    return [
        Series(name="resident memory", unit="bytes", x_name="requests", x=done, y=memory),
        Series(name="free KV blocks", unit="blocks", x_name="requests", x=done, y=free_blocks),
    ]


async def benchmark(options: Options) -> BenchResult:
    num_requests, interval = (1000, 100) if options.quick else (10_000, 500)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_tokenizer(make_tiny_checkpoint(Path(folder) / "tiny", "llama", dtype="float32"))
        log = Path(folder) / "server.log"
        with ServerProcess(model, log, arguments=["--num-threads", "1"]) as server:
            series = await watch(options, server, num_requests, interval)
    return BenchResult(
        benchmark="memory_flat",
        environment=options.environment(),
        seed=options.seed,
        parameters={"num_requests": num_requests, "concurrency": _CONCURRENCY},
        series=series,
    )


if __name__ == "__main__":
    run(benchmark, "memory_flat", __doc__)
