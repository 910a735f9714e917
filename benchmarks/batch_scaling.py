"""Output tokens per second of one stream against eight at once, in the engine without a frontend."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

from benchmarks.common import Options, compare, interleave, random_prompt, run
from benchmarks.inprocess import engine, stream_greedy
from engine.client.base import EngineClient
from server.bench.schema import BenchResult, Comparison

_NUM_STREAMS = 8


async def tokens_per_second(
    client: EngineClient, tag: str, num_streams: int, prompt_len: int, num_tokens: int, seed: int
) -> float:
    """Start all streams at once; all their tokens over the time until the last one ends, prompts included."""
    vocab_size = client.model_info.vocab_size
    prompts = [random_prompt(prompt_len, vocab_size, seed, i) for i in range(num_streams)]
    start = time.perf_counter()
    streamed = await asyncio.gather(
        *(stream_greedy(client, f"{tag}-{i}", prompt, num_tokens) for i, prompt in enumerate(prompts))
    )
    return num_streams * num_tokens / (max(stream.last_at for stream in streamed) - start)


async def compare_dtype(options: Options, dtype: str, prompt_len: int, num_tokens: int) -> Comparison:
    """One stream (A) against eight (B)."""
    async with engine(options, dtype) as client:

        async def measure(num_streams: int, pair: int) -> float:
            tag = f"{num_streams}-{pair}"
            return await tokens_per_second(client, tag, num_streams, prompt_len, num_tokens, options.seed)

        values = await interleave(options.num_pairs, partial(measure, 1), partial(measure, _NUM_STREAMS))
    return compare(f"throughput, {dtype}", "tokens/s", "1 stream", f"{_NUM_STREAMS} streams", values)


async def benchmark(options: Options) -> BenchResult:
    prompt_len, num_tokens = (16, 32) if options.quick else (32, 128)
    return BenchResult(
        benchmark="batch_scaling",
        environment=options.environment(),
        seed=options.seed,
        parameters={"model": Path(options.model).name, "prompt_len": prompt_len, "num_tokens": num_tokens},
        comparisons=[
            await compare_dtype(options, dtype, prompt_len, num_tokens) for dtype in ("float32", "bfloat16")
        ],
    )


if __name__ == "__main__":
    run(benchmark, "batch_scaling", __doc__)
