"""What grammars cost: time per output token of streams without (A) and with (B) one, and of those beside one.

In the engine without a frontend. The grammar lets through nearly every text, so that both sides generate as many tokens
and the difference is the price of the masks and of the second launch of each step; it was compiled before.
"""

from __future__ import annotations

import asyncio
import statistics
from functools import partial
from pathlib import Path

from benchmarks.common import Options, compare, interleave, random_prompt, run
from benchmarks.inprocess import engine, stream_greedy
from engine.client.base import EngineClient
from engine.params import Constraint
from server.bench.schema import BenchResult, Comparison

ANY_TEXT = Constraint(kind="regex", text=r"(.|\n)*")
CASES = ((1, 1), (8, 1), (8, 8))  # streams; of these, with a grammar


async def time_per_output_token(
    client: EngineClient, tag: str, constraints: list[Constraint | None], num_tokens: int, seed: int
) -> list[float]:
    """Seconds, of streams that start at once; one stream for each constraint."""
    vocab_size = client.model_info.vocab_size
    streamed = await asyncio.gather(
        *(
            stream_greedy(
                client, f"{tag}-{i}", random_prompt(32, vocab_size, seed, i), num_tokens, constraint
            )
            for i, constraint in enumerate(constraints)
        )
    )
    return [stream.time_per_output_token for stream in streamed]


async def compare_batch(
    client: EngineClient, options: Options, num_streams: int, num_guided: int, num_tokens: int
) -> Comparison:
    """The first `num_guided` streams have a grammar; the times are those of the others, if there are any."""

    async def measure(has_grammar: bool, pair: int) -> float:
        tag = f"{num_streams}-{num_guided}-{has_grammar}-{pair}"
        guided = ANY_TEXT if has_grammar else None
        constraints = [guided] * num_guided + [None] * (num_streams - num_guided)
        times = await time_per_output_token(client, tag, constraints, num_tokens, options.seed)
        return statistics.median(times[num_guided:] or times)

    values = await interleave(options.num_pairs, partial(measure, False), partial(measure, True))
    who = "all" if num_guided == num_streams else f"beside {num_guided}"
    return compare(f"{num_streams} streams, {who}", "s/token", "no grammar", "grammar", values)


async def benchmark(options: Options) -> BenchResult:
    num_tokens = 32 if options.quick else 128
    async with engine(options) as client:
        await time_per_output_token(client, "compile", [ANY_TEXT], 2, options.seed)
        comparisons = [await compare_batch(client, options, *case, num_tokens) for case in CASES]
    return BenchResult(
        benchmark="structured_output",
        environment=options.environment(),
        seed=options.seed,
        parameters={"model": Path(options.model).name, "prompt_len": 32, "num_tokens": num_tokens},
        comparisons=comparisons,
    )


if __name__ == "__main__":
    run(benchmark, "structured_output", __doc__)
