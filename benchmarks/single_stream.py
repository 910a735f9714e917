"""Time per output token of one greedy stream: our engine against transformers `generate`.

Same checkpoint, dtype, threads and prompts, in one process, in turn. Both are timed from their first token to
their last, so prompt processing counts for neither.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.common import Options, compare, interleave, random_prompt, run
from benchmarks.inprocess import engine, stream_greedy
from server.bench.schema import BenchResult, Comparison
from tests.support.gguf_reference import load_gguf_reference


class _Clock(BaseStreamer):  # type: ignore[misc]  # transformers has no types
    """Notes when transformers hands over each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:  # [1] int64, first the prompt [1, length]
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def load_reference(model: str, dtype: torch.dtype) -> Any:
    """The same checkpoint in transformers, in eval mode."""
    path = Path(model)
    if path.suffix == ".gguf":
        return load_gguf_reference(path, dtype)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def generate_reference(model: Any, prompt: list[int], num_tokens: int, num_threads: int) -> float:
    """Time per output token of `generate`, greedy, KV cache on; seconds."""
    torch.set_num_threads(num_threads)  # holds for the thread that calls it
    clock = _Clock()
    with torch.inference_mode():
        model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=model.device),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            streamer=clock,
        )
    tokens = clock.times[1:]  # the first entry is the prompt
    assert len(tokens) == num_tokens, f"got {len(tokens)} tokens, expected {num_tokens}"
    return (tokens[-1] - tokens[0]) / (num_tokens - 1)


async def compare_dtype(options: Options, dtype: str, prompt_len: int, num_tokens: int) -> Comparison:
    """transformers (A) against our engine (B)."""
    reference = load_reference(options.model, getattr(torch, dtype)).to(options.device)
    async with engine(options, dtype) as client:
        vocab_size = client.model_info.vocab_size

        async def theirs(pair: int) -> float:
            prompt = random_prompt(prompt_len, vocab_size, options.seed, pair + 1)
            return await asyncio.to_thread(
                generate_reference, reference, prompt, num_tokens, options.num_threads
            )

        async def ours(pair: int) -> float:
            prompt = random_prompt(prompt_len, vocab_size, options.seed, pair + 1)
            streamed = await stream_greedy(client, str(pair), prompt, num_tokens)
            return streamed.time_per_output_token

        values = await interleave(options.num_pairs, theirs, ours)
    return compare(f"time per output token, {dtype}", "s", "transformers", "slipstream", values)


async def benchmark(options: Options) -> BenchResult:
    prompt_len, num_tokens = (64, 32) if options.quick else (128, 128)
    return BenchResult(
        benchmark="single_stream",
        environment=options.environment(),
        seed=options.seed,
        parameters={"model": Path(options.model).name, "prompt_len": prompt_len, "num_tokens": num_tokens},
        comparisons=[
            await compare_dtype(options, dtype, prompt_len, num_tokens) for dtype in ("float32", "bfloat16")
        ],
    )


if __name__ == "__main__":
    run(benchmark, "single_stream", __doc__)
