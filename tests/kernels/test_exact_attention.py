"""Attention in exact numerics: what it computes, and that a row's bits depend on the row alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.attention.registry import make_attention_backend
from engine.config import ModelConfig
from engine.kernels.exact_attention import LONG_ROWS, SHORT_ROWS, exact_attention, segment_size
from engine.kernels.paged_attention import MAX_COUNTERS, paged_attention_reference
from engine.models.loader import load_model
from tests.support.attention_batches import (
    CASES,
    DEVICE,
    HALF,
    TOLERANCE,
    AttentionBatch,
    Case,
    relative_error,
)
from tests.support.paged_forward import PagedForward
from tests.support.tiny_models import make_tiny_checkpoint

FORMS: dict[str, dict[str, Any]] = {
    "whole": {"splits": False, "num_rows": SHORT_ROWS},
    "long": {"splits": False, "num_rows": LONG_ROWS},
    "split": {"splits": True, "num_rows": SHORT_ROWS},
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    batch = AttentionBatch(case, dtype)
    assert (
        relative_error(batch.by(exact_attention), batch.expected(paged_attention_reference))
        < TOLERANCE[dtype]
    )


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 4, 2), (300, 33, 100), 9, 3, 64),
        Case((5, 1), (150, 77), 4, 2, 256, window=70),
        Case((3,), (90,), 8, 1, 512, window=40),
    ],
    ids=str,
)
def test_its_forms_have_the_same_bits(case: Case) -> None:
    """In registers, in registers with more rows, and split: folded in place (twice: counters are left as they were) or
    by the second kernel."""
    batch = AttentionBatch(case, HALF)
    expected = batch.by(exact_attention, **FORMS["whole"])
    assert torch.equal(batch.by(exact_attention, **FORMS["long"]), expected)
    assert torch.equal(batch.by(exact_attention, **FORMS["split"]), expected)
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        assert torch.equal(batch.by(exact_attention, counters=counters, **FORMS["split"]), expected)
    assert not counters.any()


@pytest.mark.parametrize("head_size", [64, 256])
@pytest.mark.parametrize("window", [None, 30])
def test_a_row_does_not_depend_on_the_chunk_that_it_is_in(head_size: int, window: int | None) -> None:
    """A chunk of all tokens, behind a neighbour, against single tokens and pieces of it."""
    num_keys = segment_size(head_size, 2) + 40
    whole = AttentionBatch(Case((3, num_keys), (50, num_keys), 4, 2, head_size, window=window), HALF)
    whole.key_cache.nan_to_num_()
    whole.value_cache.nan_to_num_()
    expected = whole.by(exact_attention)[3:]
    part = AttentionBatch(replace(whole.case, query_lens=(1,), seq_lens=(1,)), HALF)
    part.key_cache, part.value_cache = whole.key_cache, whole.value_cache
    part.block_table = whole.block_table[1:]
    for start, end in ((0, 1), (37, 42), (num_keys - 1, num_keys), (num_keys - 33, num_keys)):
        part.case = replace(whole.case, query_lens=(end - start,), seq_lens=(end,))
        part.query = whole.query[3 + start : 3 + end].contiguous()
        part.query_start_loc = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        part.seq_lens = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        part.positions = torch.arange(start, end, device=DEVICE)
        assert torch.equal(part.by(exact_attention), expected[start:end])


def test_a_model_with_windows_computes_by_it_what_it_does_by_operations_of_torch(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path, "gemma3_text", dtype="float32")
    model = load_model(ModelConfig(model=str(checkpoint), dtype="float32"), device=DEVICE).model
    prompt = torch.randint(3, 300, (37,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = []
    for name, is_exact in (("torch", False), ("triton", True)):
        forward = PagedForward(
            model,
            num_requests=2,
            max_tokens=48,
            block_size=16,
            dtype=torch.float32,
            backend=make_attention_backend(name, DEVICE, is_exact),
            device=DEVICE,
        )
        steps = [[(0, prompt[:20]), (1, prompt[:3])], [(0, prompt[20:]), (1, prompt[3:4])]]
        logits.append(torch.cat([rows for step in steps for rows in forward.step(step)]))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
