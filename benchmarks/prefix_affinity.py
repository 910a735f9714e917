"""What prefix affinity brings: two servers behind the example Envoy, prompts with common prefixes, balanced two ways.

The prefixes fit into the KV caches of both servers together, but not into one. A balances by load, B by a header that
names the prefix. Reported are the share of prompt tokens that a prefix cache had, and the median time to first token.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import Options, compare, random_prompt, run
from server.bench.driver import connect
from server.bench.schema import BenchResult
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.envoy_process import EnvoyProcess, in_front_of
from tools.server_process import ServerProcess

_CONFIG = Path(__file__).parent.parent / "deploy" / "envoy" / "envoy.yaml"
_NUM_PREFIXES = 8
_PREFIX = 256  # tokens
_QUESTION = 16
_ANSWER = 4
_CONCURRENCY = 2
_KV_CACHE = "36MiB"  # SmolLM2 in bfloat16: 1,638 tokens, of 8 * 276


@dataclass
class Window:
    """What the requests of one half of a pair saw."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def make_requests(num_rounds: int, vocab_size: int, seed: int) -> list[tuple[str, pb.GenerateRequest]]:
    """Prefix name and request; every round asks once about each prefix, in an order of its own."""
    order = random.Random(seed)
    requests = []
    for turn in range(num_rounds):
        for prefix in order.sample(range(_NUM_PREFIXES), _NUM_PREFIXES):
            question = random_prompt(_QUESTION, vocab_size, seed, 1 + turn * _NUM_PREFIXES + prefix)
            prompt = random_prompt(_PREFIX, vocab_size, seed * _NUM_PREFIXES + prefix, 0) + question
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt),
                sampling=pb.SamplingParams(temperature=0.0),
                stopping=pb.StoppingParams(max_tokens=_ANSWER, ignore_eos=True),
            )
            requests.append((f"{seed}-{prefix}", request))
    return requests


async def measure_window(
    stub: pb_grpc.GenerationServiceStub, requests: list[tuple[str, pb.GenerateRequest]], *, by_prefix: bool
) -> Window:
    """Keep `_CONCURRENCY` streams busy until all requests are answered."""
    window, remaining = Window(), iter(requests)

    async def stream() -> None:
        for prefix, request in remaining:
            start = time.perf_counter()
            is_first = True
            async for response in stub.Generate(
                request, metadata=(("x-prefix-affinity", prefix),) if by_prefix else ()
            ):
                if response.HasField("delta") and is_first:
                    window.first_token_seconds.append(time.perf_counter() - start)
                    is_first = False
            window.prompt_tokens += response.finished.usage.prompt_tokens
            window.cached_tokens += response.finished.usage.cached_tokens

    async with asyncio.TaskGroup() as group:
        for _ in range(_CONCURRENCY):
            group.create_task(stream())
    return window


async def measure(
    options: Options, address: str
) -> tuple[pb.GetModelInfoResponse, list[tuple[Window, Window]]]:
    """All pairs, after one that is not counted. Each window has prefixes that no server has seen."""
    num_rounds = 3 if options.quick else 6
    async with connect(address, _CONCURRENCY) as stubs:
        info = await stubs[0].GetModelInfo(pb.GetModelInfoRequest())
        pairs = []
        for i in range(options.num_pairs + 1):
            seed = options.seed * 1000 + 2 * i
            by_load, by_prefix = [
                await measure_window(
                    stubs[0], make_requests(num_rounds, info.vocab_size, seed + side), by_prefix=bool(side)
                )
                for side in (0, 1)
            ]
            pairs.append((by_load, by_prefix))
            print(f"pair {i}: cached {by_load.cached_share:.3f}, {by_prefix.cached_share:.3f}", flush=True)
    return info, pairs[1:]


async def benchmark(options: Options) -> BenchResult:
    arguments = ["--device", options.device, "--num-threads", str(max(1, options.num_threads // 2))]
    arguments += ["--dtype", "bfloat16", "--kv-cache-memory", _KV_CACHE, "--max-model-len", "512"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [
            stack.enter_context(ServerProcess(options.model, folder / f"{i}.log", arguments=arguments)).port
            for i in range(2)
        ]
        envoy = stack.enter_context(EnvoyProcess(in_front_of(_CONFIG, ports), folder))
        info, pairs = await measure(options, envoy.address)
    shares = [a.cached_share for a, _ in pairs], [b.cached_share for _, b in pairs]
    latencies = (
        [statistics.median(a.first_token_seconds) for a, _ in pairs],
        [statistics.median(b.first_token_seconds) for _, b in pairs],
    )
    return BenchResult(
        benchmark="prefix_affinity",
        environment=options.environment(),
        seed=options.seed,
        parameters={
            "model": info.model,
            "dtype": info.dtype,
            "num_servers": 2,
            "num_prefixes": _NUM_PREFIXES,
            "prefix_tokens": _PREFIX,
            "question_tokens": _QUESTION,
            "concurrency": _CONCURRENCY,
            "kv_cache_memory": _KV_CACHE,
        },
        comparisons=[
            compare("share of prompt tokens found in a prefix cache", "", "by load", "by prefix", shares),
            compare("median time to first token", "s", "by load", "by prefix", latencies),
        ],
    )


if __name__ == "__main__":
    run(benchmark, "prefix_affinity", __doc__)
