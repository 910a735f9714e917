"""Ragged batches over paged caches for the kernels of attention, and what their rows may read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bfloat16 product is wrong, so on CPU the half type is float16.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int = 16
    window: int | None = None
    num_behind: int = 0  # last rows of the first request that lie behind its keys


CASES = [
    Case((1,), (5,), 9, 3, 64),
    Case((1, 4, 2), (70, 33, 100), 8, 2, 64),
    Case((20, 1, 3), (20, 45, 90), 4, 1, 128),
    Case((5, 1), (50, 77), 4, 2, 256, window=24),
    Case((3,), (40,), 2, 1, 512),
    Case((5, 1), (90, 40), 8, 1, 512, window=30),
    Case((1, 2), (40, 9), 6, 2, 80, block_size=1, window=7),
    Case((37,), (90,), 3, 3, 64, block_size=4),
    Case((1, 4, 2), (130, 33, 100), 9, 3, 64),
    Case((3, 1), (99, 64), 4, 2, 128, window=40),
    Case((1, 1), (65, 1), 2, 1, 256),
    Case((1,), (40,), 2, 1, 64, window=7),
    Case((5,), (90,), 2, 1, 64, block_size=64, window=10),
    Case((2, 1), (200, 40), 2, 1, 64, block_size=256, window=30),
    Case((5, 5), (47, 40), 4, 2, 64, num_behind=3),
    Case((5, 2), (67, 40), 4, 2, 64, num_behind=4),
]


class AttentionBatch:
    """Random queries, keys and values. What no row may read is NaN."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        generator = torch.Generator(device="cpu").manual_seed(len(case.query_lens) + case.head_size)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

        num_reqs, num_tokens = len(case.query_lens), sum(case.query_lens)
        max_blocks = -(-max(case.seq_lens) // case.block_size)
        num_blocks = max_blocks * num_reqs + 3
        self.query = random(num_tokens, case.num_heads, case.head_size)
        self.key_cache = random(num_blocks, case.block_size, case.num_kv_heads, case.head_size)
        self.value_cache = random(num_blocks, case.block_size, case.num_kv_heads, case.head_size)
        order = torch.randperm(num_blocks, generator=generator)[: max_blocks * num_reqs]
        self.block_table = order.view(num_reqs, max_blocks).int().to(DEVICE)
        lens = torch.tensor(case.query_lens)
        self.query_start_loc = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0))).int().to(DEVICE)
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=DEVICE)
        pairs = zip(case.query_lens, case.seq_lens, strict=True)
        self.positions = torch.cat([torch.arange(total - new, total) for new, total in pairs]).to(DEVICE)
        self.positions[: case.query_lens[0]] += case.num_behind
        self.scale = case.head_size**-0.5
        self._poison()

    def _poison(self) -> None:
        case = self.case
        is_seen = torch.zeros(self.key_cache.shape[:2], dtype=torch.bool, device=DEVICE)
        for request, total in enumerate(case.seq_lens):
            first_row = int(self.positions[int(self.query_start_loc[request])])
            first_key = 0 if case.window is None else max(first_row - case.window + 1, 0)
            # Before it, a block's keys are the request's own; blocks before that may be another's.
            keys = torch.arange(first_key // case.block_size * case.block_size, total, device=DEVICE)
            blocks = self.block_table[request].long()[keys // case.block_size]
            is_seen[blocks, keys % case.block_size] = True
        self.key_cache[~is_seen] = self.value_cache[~is_seen] = float("nan")

    @property
    def where(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """block_table, query_start_loc, seq_lens, positions."""
        return self.block_table, self.query_start_loc, self.seq_lens, self.positions

    def by(self, attention: Any, **options: Any) -> torch.Tensor:
        """What a kernel's launcher makes of the batch."""
        output: torch.Tensor = attention(
            self.query,
            self.key_cache,
            self.value_cache,
            *self.where,
            scale=self.scale,
            max_query_len=max(self.case.query_lens),
            max_seq_len=max(self.case.seq_lens),
            window=self.case.window,
            **options,
        )
        return output

    def expected(self, reference: Any) -> torch.Tensor:
        """The reference in float64. It multiplies what is masked by zero, so it gets no NaN."""
        caches = [cache.double().nan_to_num() for cache in (self.key_cache, self.value_cache)]
        options = {"scale": self.scale, "window": self.case.window}
        output: torch.Tensor = reference(self.query.double(), *caches, *self.where, **options)
        return output


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
