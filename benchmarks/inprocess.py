"""An engine in this process and one greedy stream of it: what is measured without server and network."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.common import Options
from engine.client.base import EngineClient
from engine.client.inproc import InprocEngineClient
from engine.config import engine_config
from engine.messages import AddRequest
from engine.params import SamplingParams


@asynccontextmanager
async def engine(options: Options, dtype: str = "auto", **scheduler: int) -> AsyncIterator[EngineClient]:
    """A started engine without speculation and without prefix cache (repeated prompts would hit it)."""
    client = InprocEngineClient(
        engine_config(
            model={"model": options.model, "dtype": dtype},
            device=options.device,
            num_threads=options.num_threads,
            cache={"enable_prefix_cache": False},
            scheduler=scheduler,
        )
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


@dataclass(frozen=True)
class Streamed:
    """When the tokens of one request came. Seconds of time.perf_counter()."""

    first_at: float
    last_at: float
    num_tokens: int

    @property
    def time_per_output_token(self) -> float:
        return (self.last_at - self.first_at) / (self.num_tokens - 1)


async def stream_greedy(
    client: EngineClient, request_id: str, prompt: list[int], num_tokens: int
) -> Streamed:
    """Generate exactly `num_tokens` (at least 2) tokens, greedily."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    stream = client.submit(AddRequest(request_id=request_id, prompt_token_ids=prompt, params=params))
    first_at = last_at = 0.0
    count = 0
    try:
        finished = False
        while not finished:
            output = await stream.next()
            if output.token_ids:
                last_at = time.perf_counter()
                first_at = first_at or last_at
                count += len(output.token_ids)
            finished = output.finish is not None
    finally:
        stream.close()
    assert count == num_tokens, f"got {count} tokens, expected {num_tokens}"
    return Streamed(first_at=first_at, last_at=last_at, num_tokens=count)
