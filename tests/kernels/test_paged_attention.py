"""The Triton kernels against their references: in the interpreter on CPU, compiled where there is a GPU.

References run in float64 on the same inputs; outputs are poisoned with NaN beforehand where the caller owns them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.kv_write import kv_write, kv_write_reference
from engine.kernels.paged_attention import MAX_COUNTERS, paged_attention, paged_attention_reference

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
    segment: int = 512
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
    Case((1, 4, 2), (130, 33, 100), 9, 3, 64, segment=32),
    Case((3, 1), (99, 64), 4, 2, 128, segment=32, window=40),
    Case((1, 1), (65, 1), 2, 1, 256, segment=32),
    Case((5, 5), (47, 40), 4, 2, 64, num_behind=3),
    Case((5, 2), (67, 40), 4, 2, 64, segment=32, num_behind=4),
]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_attention_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cpu").manual_seed(len(case.query_lens) + case.head_size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    num_reqs, num_tokens = len(case.query_lens), sum(case.query_lens)
    max_blocks = -(-max(case.seq_lens) // case.block_size)
    num_blocks = max_blocks * num_reqs + 3
    query = random(num_tokens, case.num_heads, case.head_size)
    key_cache = random(num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    value_cache = random(num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    order = torch.randperm(num_blocks, generator=generator)[: max_blocks * num_reqs]
    block_table = order.view(num_reqs, max_blocks).int().to(DEVICE)
    lens = torch.tensor(case.query_lens)
    query_start_loc = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0))).int().to(DEVICE)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=DEVICE)
    positions = torch.cat(
        [torch.arange(total - new, total) for new, total in zip(case.query_lens, case.seq_lens, strict=True)]
    ).to(DEVICE)
    positions[: case.query_lens[0]] += case.num_behind
    scale = case.head_size**-0.5
    expected = paged_attention_reference(
        query.double(),
        key_cache.double(),
        value_cache.double(),
        block_table,
        query_start_loc,
        seq_lens,
        positions,
        scale=scale,
        window=case.window,
    )
    is_seen = torch.zeros(num_blocks, case.block_size, dtype=torch.bool, device=DEVICE)
    for request, total in enumerate(case.seq_lens):
        first_row = int(positions[int(query_start_loc[request])])
        first_key = 0 if case.window is None else max(first_row - case.window + 1, 0)
        keys = torch.arange(first_key, total, device=DEVICE)
        is_seen[block_table[request].long()[keys // case.block_size], keys % case.block_size] = True
    key_cache[~is_seen] = value_cache[~is_seen] = float("nan")  # nobody may touch it
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=DEVICE)
    for own_counters in (None, counters, counters):  # merged by a second kernel, in place, and once more
        actual = paged_attention(
            query,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            seq_lens,
            positions,
            scale=scale,
            max_query_len=max(case.query_lens),
            max_seq_len=max(case.seq_lens),
            window=case.window,
            counters=own_counters,
            segment=case.segment,
        )
        assert relative_error(actual, expected) < TOLERANCE[dtype]
    assert not counters.any()


def test_kv_write_stores_strided_tokens_and_skips_padding() -> None:
    heads = torch.randn(7, 5, 24, device=DEVICE)
    key, value = heads[:, :3], heads[:, 2:]
    slots = torch.tensor([9, -1, 0, 31, 5, -1, 14], device=DEVICE)
    caches = [torch.full((8, 4, 3, 24), float("nan"), device=DEVICE) for _ in range(4)]
    kv_write(key, value, caches[0], caches[1], slots)
    kv_write_reference(key, value, caches[2], caches[3], slots)
    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=0)
