"""Attention alone on a GPU, for `python -m benchmarks.gpu_kernels --attention`: as it is launched, or in every form."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.geometries import GEOMETRIES
from engine.kernels.attention_form import DEEP, Form, HeadShape, segment_size
from engine.kernels.paged_attention import MAX_COUNTERS, paged_attention
from engine.kernels.triton_support import next_power_of_2

BYTES_IN_TURN = 400 << 20  # of keys and values, several times the L2 cache
BLOCK_SIZE = 16
STEPS = [
    *((batch, 300, 1) for batch in (1, 8, 16, 32, 64, 256)),
    *((batch, 300, 5) for batch in (1, 8, 32, 64)),
    *((1, 2000, 1), (8, 2000, 1), (64, 1000, 1), (32, 4000, 1)),
]
PROMPTS = [(1, 4096, 4096), (64, 128, 128)]


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None


def heads_of(name: str, config: dict[str, Any]) -> dict[str, Heads]:
    """By name, of a geometry's kinds of layers; none where attention is over latents."""
    num_heads, num_kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if num_kv_heads is None:
        return {}
    head_size = config.get("head_dim", config["hidden_size"] // num_heads)
    if "sliding_window" not in config:
        return {name: Heads(num_heads, num_kv_heads, head_size)}
    full_kv_heads = config.get("num_global_key_value_heads", num_kv_heads)
    return {
        f"{name} sliding": Heads(num_heads, num_kv_heads, head_size, config["sliding_window"]),
        f"{name} full": Heads(num_heads, full_kv_heads, config["global_head_dim"]),
    }


HEADS = {kind: heads for name in GEOMETRIES for kind, heads in heads_of(name, GEOMETRIES[name]).items()}


@dataclass(frozen=True)
class Work:
    """Every request has `context` keys and `query_len` new tokens."""

    heads: str
    batch: int
    context: int
    query_len: int

    @property
    def num_bytes(self) -> int:
        """Of the keys and values that are seen."""
        heads = HEADS[self.heads]
        num_keys = min(self.context, (heads.window or self.context) + self.query_len - 1)
        return 4 * self.batch * num_keys * heads.num_kv_heads * heads.head_size


class Inputs:
    """Random ones, over more caches than the L2 cache holds."""

    def __init__(self, work: Work, device: torch.device) -> None:
        heads = HEADS[work.heads]
        self._window = heads.window
        num_blocks = -(-work.context // BLOCK_SIZE) * work.batch
        count = min(max(BYTES_IN_TURN // work.num_bytes, 4), 60)
        shape = (2, num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_size)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.caches = [torch.randn(shape, **options) for _ in range(count)]
        num_tokens = work.batch * work.query_len
        self._query = torch.randn(num_tokens, heads.num_heads, heads.head_size, **options)
        starts = torch.arange(0, num_tokens + 1, work.query_len, device=device, dtype=torch.int32)
        self._where = (
            torch.randperm(num_blocks, device=device).view(work.batch, -1).int(),
            starts,
            torch.full((work.batch,), work.context, device=device, dtype=torch.int32),
            torch.arange(work.context - work.query_len, work.context, device=device).repeat(work.batch),
        )
        self._bounds: dict[str, Any] = {"max_query_len": work.query_len, "max_seq_len": work.context}
        self._counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)

    def attend(
        self, cache: torch.Tensor, form: Form | None = None, segment: int | None = None
    ) -> torch.Tensor:
        return paged_attention(
            self._query,
            cache[0],
            cache[1],
            *self._where,
            scale=self._query.shape[-1] ** -0.5,
            window=self._window,
            counters=self._counters,
            form=form,
            segment=segment,
            **self._bounds,
        )


def works(kinds: Collection[str] = tuple(HEADS)) -> list[Work]:
    return [Work(heads, *shape) for heads in kinds for shape in (*STEPS, *PROMPTS)]


def forms(work: Work) -> Iterator[tuple[Form, int]]:
    """Forms and sizes of segments that may be worth trying."""
    heads = HEADS[work.heads]
    head_size, group = heads.head_size, heads.num_heads // heads.num_kv_heads
    usual = segment_size(HeadShape(group, head_size, 2), torch.device("cuda", 0))
    tile_rows = work.query_len * next_power_of_2(group)
    row_counts: tuple[int, ...] = (16, 32) if tile_rows > 16 else (16,)
    # Span, stages, registers.
    kinds: tuple[tuple[int, int, int | None], ...] = (
        (0, 2, None),
        (0, 2, 128),
        (0, DEEP, None),
        (1, 1, None),
    )
    warp_counts: tuple[int, ...] = (2, 4, 8)
    if work.query_len > 16:
        row_counts, kinds, warp_counts = (32, 64, 128), ((0, 2, None), (0, DEEP, None)), (4, 8)
    choices = itertools.product(row_counts, kinds, warp_counts, (usual // 2, usual, 2 * usual))
    for num_rows, (span, num_stages, max_registers), num_warps, segment in choices:
        num_words = num_rows * (2 * head_size + segment) // (32 * num_warps)  # of a thread, for its tiles
        is_idle = num_rows * max(segment, head_size) < 512 * num_warps or num_words < 24
        if num_words <= 260 and not is_idle:
            yield Form(num_rows, span, num_warps, num_stages, max_registers), segment


def measure_attention(
    work: Work, time_us: Callable[[Callable[[Any], Any], Sequence[Any]], float], *, tunes: bool
) -> list[dict[str, Any]]:
    """A row for the launch as it is chosen; `tunes`: and one for every other form, the fastest first."""
    device = torch.device("cuda")
    inputs = Inputs(work, device)

    def measure(form: Form | None = None, segment: int | None = None) -> dict[str, Any]:
        us = time_us(lambda cache: inputs.attend(cache, form, segment), inputs.caches)
        shape = {**asdict(form), "segment": segment} if form else {}
        return {**asdict(work), **shape, "us": us, "gb_per_s": work.num_bytes / us / 1e3}

    rows = [measure()]
    for form, segment in forms(work) if tunes else ():
        with suppress(OutOfResources):  # of shared memory
            rows.append(measure(form, segment))
    rows.sort(key=lambda row: float(row["us"]))
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows
