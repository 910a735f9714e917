"""What a long prompt does to streams that are running: their p99 inter-token latency without and with it.

Through the real server process at its default settings. A pair is two windows of the same streams: A is
undisturbed; B lasts from the sending of a 2,000-token prompt to its first token. A latency belongs to the
window that its message arrived in.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import Options, compare, random_prompt, run
from server.bench.driver import connect
from server.bench.schema import BenchResult
from server.bench.statistics import summarize
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.server_process import ServerProcess

_NUM_STREAMS = 4
_LONG_PROMPT = 2000  # tokens
_SHORT_PROMPT = 32


@dataclass
class Watched:
    """Inter-token latencies of the running streams: (arrival, seconds per token)."""

    latencies: list[tuple[float, float]] = field(default_factory=list)
    num_started: int = 0

    def p99(self, start: float, end: float) -> float:
        return summarize([seconds for at, seconds in self.latencies if start <= at <= end]).p99


def greedy(prompt: list[int], num_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
    )


async def watch(stub: pb_grpc.GenerationServiceStub, request: pb.GenerateRequest, watched: Watched) -> None:
    """Read one stream until it is cancelled."""
    last: float | None = None
    async for response in stub.Generate(request):
        if num_tokens := len(response.delta.token_ids):
            now = time.perf_counter()
            if last is None:
                watched.num_started += 1
            else:
                watched.latencies += [(now, (now - last) / num_tokens)] * num_tokens
            last = now


async def measure_pair(
    stub: pb_grpc.GenerationServiceStub, vocab_size: int, window: float, num_tokens: int, seed: int
) -> tuple[float, float]:
    """p99 of the undisturbed and of the disturbed window; seconds."""
    watched = Watched()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                watch(stub, greedy(random_prompt(_SHORT_PROMPT, vocab_size, seed, i), num_tokens), watched)
            )
            for i in range(_NUM_STREAMS)
        ]
        while watched.num_started < _NUM_STREAMS:
            await asyncio.sleep(0.01)
        undisturbed = time.perf_counter()
        await asyncio.sleep(window)
        disturbed = time.perf_counter()
        async for _ in stub.Generate(greedy(random_prompt(_LONG_PROMPT, vocab_size, seed, _NUM_STREAMS), 1)):
            pass
        end = time.perf_counter()
        assert not any(task.done() for task in tasks), "the streams ended before the long prompt did"
        for task in tasks:
            task.cancel()
    return watched.p99(undisturbed, disturbed), watched.p99(disturbed, end)


async def measure(
    options: Options, address: str
) -> tuple[pb.GetModelInfoResponse, list[tuple[float, float]]]:
    """All pairs, after one that is not counted."""
    window, num_tokens = (3.0, 1500) if options.quick else (10.0, 4000)
    async with connect(address, _NUM_STREAMS + 1) as stubs:
        info = await stubs[0].GetModelInfo(pb.GetModelInfoRequest())
        pairs = []
        for i in range(options.num_pairs + 1):
            seed = options.seed * 1000 + i
            pairs.append(await measure_pair(stubs[0], info.vocab_size, window, num_tokens, seed))
            print(f"pair {i}: undisturbed {pairs[i][0]:.4f} s, disturbed {pairs[i][1]:.4f} s", flush=True)
    return info, pairs[1:]


async def benchmark(options: Options) -> BenchResult:
    arguments = ["--device", options.device, "--num-threads", str(options.num_threads)]
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(options.model, Path(folder) / "server.log", arguments=arguments) as server,
    ):
        info, pairs = await measure(options, server.address)
    undisturbed, disturbed = [a for a, _ in pairs], [b for _, b in pairs]
    return BenchResult(
        benchmark="interference",
        environment=options.environment(),
        seed=options.seed,
        parameters={
            "model": info.model,
            "dtype": info.dtype,
            "num_streams": _NUM_STREAMS,
            "long_prompt": _LONG_PROMPT,
        },
        comparisons=[
            compare("p99 inter-token latency", "s", "undisturbed", "disturbed", (undisturbed, disturbed))
        ],
    )


if __name__ == "__main__":
    run(benchmark, "interference", __doc__)
