"""The Triton kernels against their references: in the interpreter on CPU, compiled where there is a GPU.

References run in float64 on the same inputs; outputs are poisoned with NaN beforehand where the caller owns them.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.kv_write import kv_write, kv_write_reference
from engine.kernels.paged_attention import MAX_COUNTERS, paged_attention, paged_attention_reference
from tests.support.attention_batches import (
    CASES,
    DEVICE,
    HALF,
    TOLERANCE,
    AttentionBatch,
    Case,
    relative_error,
)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_attention_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    batch = AttentionBatch(case, dtype)
    expected = batch.expected(paged_attention_reference)
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=DEVICE)
    for own_counters in (None, counters, counters):  # merged by a second kernel, in place, and once more
        actual = batch.by(paged_attention, counters=own_counters, segment=case.segment)
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
