"""Attention over latent rows against its reference: in the interpreter on CPU, compiled where there is a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.latent_attention import latent_attention, latent_attention_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bfloat16 product is wrong, so on CPU the half type is float16.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int
    value_size: int
    rest_size: int
    block_size: int = 16
    segment: int = 256
    num_behind: int = 0  # last rows of the first request that lie behind its keys


CASES = [
    Case((1,), (5,), 16, 64, 16),
    Case((1, 4, 2), (70, 33, 100), 4, 32, 8),
    Case((20, 1, 3), (20, 45, 90), 20, 16, 24),  # heads in two parts, the second one not full
    Case((1, 2), (40, 9), 6, 128, 64, block_size=1),
    Case((2, 1), (20, 50), 5, 24, 8, segment=32),
    Case((3,), (40,), 1, 512, 64),
    Case((37,), (90,), 3, 32, 16, block_size=4),
    Case((1, 4, 2), (130, 33, 100), 16, 64, 16, segment=32),
    Case((5, 5), (47, 40), 4, 32, 8, num_behind=3),
    Case((5, 2), (67, 40), 4, 32, 8, segment=32, num_behind=4),
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_latent_attention_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(case.query_lens) + case.value_size)
    row_size = case.value_size + case.rest_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    num_reqs, num_tokens = len(case.query_lens), sum(case.query_lens)
    max_blocks = -(-max(case.seq_lens) // case.block_size)
    num_blocks = max_blocks * num_reqs + 3
    query = random(num_tokens, case.num_heads, row_size)
    cache = random(num_blocks, case.block_size, 1, row_size)
    order = torch.randperm(num_blocks, generator=generator)[: max_blocks * num_reqs]
    block_table = order.view(num_reqs, max_blocks).int().to(DEVICE)
    starts = torch.tensor([0, *case.query_lens]).cumsum(0).int().to(DEVICE)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=DEVICE)
    positions = torch.cat(
        [torch.arange(total - new, total) for new, total in zip(case.query_lens, case.seq_lens, strict=True)]
    ).to(DEVICE)
    positions[: case.query_lens[0]] += case.num_behind
    scale = row_size**-0.5
    where = (block_table, starts, seq_lens, positions)
    expected = latent_attention_reference(
        query.double(), cache.double(), *where, value_size=case.value_size, scale=scale
    )
    is_seen = torch.zeros(num_blocks, case.block_size, dtype=torch.bool, device=DEVICE)
    for request, total in enumerate(case.seq_lens):
        keys = torch.arange(total, device=DEVICE)
        is_seen[block_table[request].long()[keys // case.block_size], keys % case.block_size] = True
    cache[~is_seen] = float("nan")  # nobody may touch it
    actual = latent_attention(
        query,
        cache,
        *where,
        value_size=case.value_size,
        scale=scale,
        max_query_len=max(case.query_lens),
        max_seq_len=max(case.seq_lens),
        segment=case.segment,
    )
    error = (actual.double() - expected).norm() / expected.norm()
    assert float(error) < TOLERANCE[dtype]


def test_a_context_that_grows_is_not_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    constants: list[dict[str, Any]] = []

    class Recorded:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **own: constants.append(own)

    for name in ("_latent_attention_kernel", "fold_segments_kernel"):
        monkeypatch.setattr(f"engine.kernels.latent_attention.{name}", Recorded())
    ints = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for max_seq_len in (600, 900, 5000):
        latent_attention(
            torch.zeros(1, 2, 24, device=DEVICE),
            torch.zeros(1, 16, 1, 24, device=DEVICE),
            ints[None],
            ints,
            ints[:1],
            ints[:1].long(),
            value_size=16,
            scale=1.0,
            max_query_len=1,
            max_seq_len=max_seq_len,
        )
    assert constants[:2] == constants[2:4] == constants[4:]
