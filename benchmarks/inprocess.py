"""An engine in this process and one stream of it: what is measured without server and network."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.common import Options
from engine.client.base import EngineClient
from engine.client.inproc import InprocEngineClient
from engine.config import engine_config
from engine.messages import AddRequest
from engine.params import Constraint, SamplingParams
from engine.stats import SpecObservation


@asynccontextmanager
async def engine(
    options: Options,
    dtype: str = "auto",
    *,
    speculators: Sequence[Mapping[str, object]] = (),
    max_model_len: int | None = None,
    **scheduler: int,
) -> AsyncIterator[EngineClient]:
    """A started engine without prefix cache (repeated prompts would hit it)."""
    client = InprocEngineClient(
        engine_config(
            model={"model": options.model, "dtype": dtype},
            device=options.device,
            num_threads=options.num_threads,
            cache={"enable_prefix_cache": False},
            scheduler=scheduler,
            speculators=speculators,
            max_model_len=max_model_len,
        )
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


@dataclass(frozen=True)
class Streamed:
    """What one request brought, and when its tokens came. Seconds of time.perf_counter()."""

    token_ids: list[int]
    first_at: float
    last_at: float
    observations: list[SpecObservation]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decode_seconds(self) -> float:
        """First token to last: prompt processing does not count."""
        return self.last_at - self.first_at

    @property
    def time_per_output_token(self) -> float:
        return self.decode_seconds / (self.num_tokens - 1)


async def stream(client: EngineClient, request: AddRequest) -> Streamed:
    """Read one request to its end."""
    opened = client.submit(request)
    first_at = last_at = 0.0
    token_ids: list[int] = []
    observations: list[SpecObservation] = []
    try:
        finished = False
        while not finished:
            output = await opened.next()
            if output.token_ids:
                last_at = time.perf_counter()
                first_at = first_at or last_at
            token_ids += output.token_ids
            observations += output.spec
            if output.finish is not None:
                assert output.finish.reason in ("stop", "length"), output.finish
                finished = True
    finally:
        opened.close()
    return Streamed(token_ids=token_ids, first_at=first_at, last_at=last_at, observations=observations)


async def stream_greedy(
    client: EngineClient,
    request_id: str,
    prompt: list[int],
    num_tokens: int,
    constraint: Constraint | None = None,
) -> Streamed:
    """Generate exactly `num_tokens` (at least 2) tokens, greedily. The constraint must allow so many."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    request = AddRequest(request_id=request_id, prompt_token_ids=prompt, params=params, constraint=constraint)
    streamed = await stream(client, request)
    assert streamed.num_tokens == num_tokens, f"got {streamed.num_tokens} tokens, expected {num_tokens}"
    return streamed
