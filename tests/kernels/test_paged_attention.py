"""Paged attention against its definition in float64, and that a row's bits depend on the row alone.

In the interpreter on CPU, compiled where there is a GPU. What no row may read is NaN in the caches.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.attention.registry import make_attention_backend
from engine.config import ModelConfig
from engine.kernels import attention_form
from engine.kernels import paged_attention as paged_attention_module
from engine.kernels.attention_form import DEEP, Form, HeadShape, choose_form, segment_size
from engine.kernels.attention_reference import paged_attention_reference
from engine.kernels.kv_write import kv_write, kv_write_reference
from engine.kernels.paged_attention import MAX_COUNTERS, paged_attention
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

WHOLE, SPLIT = Form(16, 0, 4, 2), Form(16, 1, 4, 1)
FORMS = [
    Form(32, 0, 4, 2),
    Form(16, 0, 8, 2),
    Form(16, 2, 2, 2),
    Form(16, 1, 8, 1),
    Form(32, 1, 4, 2),
    Form(32, 1, 8, 1),
    Form(16, 4, 4, 2),
]
DEEP_FORMS = [Form(16, 0, 4, DEEP), Form(16, 0, 8, DEEP), Form(32, 0, 4, DEEP), Form(32, 0, 8, DEEP)]
WIDE_FORMS = [Form(64, 0, 4, 2), Form(64, 0, 8, 2), Form(128, 0, 8, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    """As it is launched, in registers, and split: folded by a second kernel and in place, twice."""
    batch = AttentionBatch(case, dtype)
    expected = batch.expected(paged_attention_reference)
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=DEVICE)
    folded_in_place: dict[str, Any] = {"form": SPLIT, "counters": counters}
    for options in ({}, {"form": WHOLE}, {"form": SPLIT}, folded_in_place, folded_in_place):
        assert relative_error(batch.by(paged_attention, **options), expected) < TOLERANCE[dtype]
    assert not counters.any()


FORM_CASES = [
    Case((1, 4, 2), (300, 33, 100), 9, 3, 64),
    Case((5, 1), (650, 77), 4, 2, 256, window=70),
    Case((60, 17, 1), (360, 17, 40), 4, 1, 128),
    Case((41, 20), (341, 20), 4, 2, 64, window=150),
]
LARGE_HEADS = Case((3,), (90,), 8, 1, 512, window=40)  # whose sums for 64 rows do not fit into registers


@pytest.mark.parametrize(
    ("case", "form"),
    [
        *((case, form) for case in FORM_CASES for form in (SPLIT, *FORMS, *DEEP_FORMS, *WIDE_FORMS)),
        (FORM_CASES[2], Form(128, 0, 8, DEEP)),
        *((LARGE_HEADS, form) for form in (SPLIT, *FORMS)),
    ],
    ids=str,
)
def test_its_forms_have_the_same_bits(case: Case, form: Form) -> None:
    batch = AttentionBatch(case, HALF)
    expected = batch.by(paged_attention, form=WHOLE)
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=DEVICE)
    for actual in (
        batch.by(paged_attention, form=form),
        batch.by(paged_attention, form=form, counters=counters),
    ):
        assert torch.equal(actual, expected)
    assert not counters.any()


@pytest.mark.parametrize("form", [WHOLE, SPLIT, Form(64, 0, 4, 2)], ids=str)
def test_no_form_is_compiled_with_fused_products(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the compiler fuses a segment's scaled peak with the difference that it meets, where both are in one kernel:
    now and then a weight is rounded in another way then.
    """
    launches: list[dict[str, Any]] = []

    class Recorder:
        def __getitem__(self, grid: object) -> Any:
            return lambda *arguments, **options: launches.append(options)

    for name in ("_paged_attention_kernel", "fold_segments_kernel"):
        monkeypatch.setattr(paged_attention_module, name, Recorder())
    AttentionBatch(Case((3, 1), (200, 90), 4, 2, 64), HALF).by(paged_attention, form=form)
    assert len(launches) == 1 + bool(form.span)
    assert not any(options["enable_fp_fusion"] for options in launches)


def test_forms_by_the_work() -> None:
    """Contexts are split while programs are few; several rows of a verification share the reading of keys."""

    def chosen(
        num_reqs: int,
        max_query_len: int,
        max_seq_len: int = 300,
        head_size: int = 128,
        window: int | None = None,
    ) -> Form:
        return choose_form(
            HeadShape(4, head_size, 2),
            torch.device("cpu"),
            num_reqs=num_reqs,
            num_kv_heads=8,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            window=window,
        )

    assert chosen(1, 1) == chosen(1, 5) == chosen(8, 1) == Form(16, 1, 8, 1)
    assert chosen(16, 1) == chosen(16, 1, 8192) == Form(16, 1, 4, 1)
    assert chosen(8, 5) == Form(32, 1, 8, 1)
    assert chosen(32, 1) == chosen(32, 1, 8192) == Form(16, 0, 4, DEEP)
    assert chosen(32, 5) == Form(32, 0, 4, DEEP)
    assert chosen(64, 1) == Form(16, 0, 4, 2)
    assert chosen(64, 5) == Form(32, 0, 4, 2, max_registers=128)
    assert chosen(1, 1, head_size=256, window=100, max_seq_len=32768) == Form(16, 1, 8, 1)
    assert chosen(4, 1, head_size=256, max_seq_len=32768) == Form(16, 1, 4, 1)
    assert chosen(16, 1, head_size=256) == Form(16, 0, 8, DEEP)
    assert chosen(64, 1, head_size=256) == Form(16, 0, 4, 2)
    assert chosen(64, 1, head_size=512) == Form(16, 0, 8, 2)
    assert chosen(8, 1, 1 << 21).span == 0  # its segments would take gigabytes
    assert chosen(1, 500) == Form(32, 0, 4, 2)  # nothing is known of the instructions for wider tiles there


def test_forms_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """High tiles for long ones; lower ones, of fewer stages, where shared memory is small."""
    monkeypatch.setattr(attention_form, "wide_tiles_sum_alike", lambda device: True)
    hopper, small = 232448, 101376

    def chosen(head_size: int, max_seq_len: int, shared_bytes: int) -> Form:
        monkeypatch.setattr(attention_form, "shared_memory_bytes", lambda device: shared_bytes)
        bounds = {"num_reqs": 1, "num_kv_heads": 2, "max_query_len": 500, "max_seq_len": max_seq_len}
        return choose_form(HeadShape(2, head_size, 2), torch.device("cpu"), **bounds)

    assert chosen(64, 4096, hopper) == chosen(128, 500, hopper) == Form(64, 0, 4, 2)
    assert chosen(128, 4096, hopper) == Form(128, 0, 8, DEEP)
    assert chosen(128, 4096, small) == Form(128, 0, 8, 2)
    assert chosen(256, 500, hopper) == Form(128, 0, 8, 2)
    assert chosen(256, 500, small) == Form(32, 0, 8, 2)


@pytest.mark.parametrize("head_size", [64, 256])
@pytest.mark.parametrize("window", [None, 30])
def test_a_row_does_not_depend_on_the_chunk_that_it_is_in(head_size: int, window: int | None) -> None:
    """A chunk of all tokens, behind a neighbour, against single tokens and pieces of it."""
    num_keys = segment_size(HeadShape(2, head_size, 2), DEVICE) + 40
    whole = AttentionBatch(Case((3, num_keys), (50, num_keys), 4, 2, head_size, window=window), HALF)
    whole.key_cache.nan_to_num_()
    whole.value_cache.nan_to_num_()
    expected = whole.by(paged_attention)[3:]
    part = AttentionBatch(replace(whole.case, query_lens=(1,), seq_lens=(1,)), HALF)
    part.key_cache, part.value_cache = whole.key_cache, whole.value_cache
    part.block_table = whole.block_table[1:]
    for start, end in ((0, 1), (37, 42), (num_keys - 1, num_keys), (num_keys - 33, num_keys)):
        part.case = replace(whole.case, query_lens=(end - start,), seq_lens=(end,))
        part.query = whole.query[3 + start : 3 + end].contiguous()
        part.query_start_loc = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        part.seq_lens = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        part.positions = torch.arange(start, end, device=DEVICE)
        assert torch.equal(part.by(paged_attention), expected[start:end])


def test_a_model_with_windows_computes_by_it_what_it_does_by_operations_of_torch(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path, "gemma3_text", dtype="float32")
    model = load_model(ModelConfig(model=str(checkpoint), dtype="float32"), device=DEVICE).model
    prompt = torch.randint(3, 300, (37,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = []
    for name in ("torch", "triton"):
        forward = PagedForward(
            model,
            num_requests=2,
            max_tokens=48,
            block_size=16,
            dtype=torch.float32,
            backend=make_attention_backend(name, DEVICE),
            device=DEVICE,
        )
        steps = [[(0, prompt[:20]), (1, prompt[:3])], [(0, prompt[20:]), (1, prompt[3:4])]]
        logits.append(torch.cat([rows for step in steps for rows in forward.step(step)]))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_kv_write_stores_strided_tokens_and_skips_padding() -> None:
    heads = torch.randn(7, 5, 24, device=DEVICE)
    key, value = heads[:, :3], heads[:, 2:]
    slots = torch.tensor([9, -1, 0, 31, 5, -1, 14], device=DEVICE)
    caches = [torch.full((8, 4, 3, 24), float("nan"), device=DEVICE) for _ in range(4)]
    kv_write(key, value, caches[0], caches[1], slots)
    kv_write_reference(key, value, caches[2], caches[3], slots)
    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=0)
