"""Norm, rotation and gated activation: the kernels against their references, in the interpreter or compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.add_normed import add_normed_reference, add_normed_triton
from engine.kernels.attention_heads import HeadLayout, HeadNorm, split_heads, store_heads
from engine.kernels.gated_activation import (
    ActivationName,
    gated_activation_reference,
    gated_activation_triton,
)
from engine.kernels.largest_logit import largest_logit_reference, largest_logit_triton
from engine.kernels.ngram_lookup import ngram_lookup_reference, ngram_lookup_triton
from engine.kernels.rms_norm import NormForm, add_rms_norm_triton, rms_norm_reference, rms_norm_triton
from engine.kernels.rotary import rotate_reference, rotate_triton
from engine.kernels.skinny_linear import choose_tiling, skinny_linear, skinny_linear_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
DTYPES = (torch.float64, torch.float32, HALF)
# A half result may be rounded the other way where float32 sums differ in their last bit.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FORMS = {
    "llama": NormForm(1e-6, rounds_first=True),
    "gemma3": NormForm(1e-6, offset=1.0),
    "gemma4": NormForm(1e-6),
}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 576), (5, 33), (3, 4, 64)], ids=str)
def test_rms_norm(shape: tuple[int, ...], form: str, dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype) * 3, random(shape[-1], dtype=dtype, seed=1)
    assert_equal(rms_norm_triton(x, weight, FORMS[form]), rms_norm_reference(x, weight, FORMS[form]))
    assert_equal(rms_norm_triton(x, None, FORMS[form]), rms_norm_reference(x, None, FORMS[form]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_some_heads_of_a_fused_product(dtype: torch.dtype) -> None:
    heads = random(4, 9, 32, dtype=dtype)
    part, weight = heads[:, 2:7], random(32, dtype=dtype, seed=1)
    assert_equal(
        rms_norm_triton(part, weight, FORMS["llama"]), rms_norm_reference(part, weight, FORMS["llama"])
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_add_rms_norm(form: str, dtype: torch.dtype) -> None:
    x, branch, weight = (random(6, 100, dtype=dtype, seed=0), random(6, 100, dtype=dtype, seed=1),
                         random(100, dtype=dtype, seed=2))  # fmt: skip
    total, normed = add_rms_norm_triton(x, branch, weight, FORMS[form])
    assert torch.equal(total, x + branch)
    assert_equal(normed, rms_norm_reference(x + branch, weight, FORMS[form]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [16, 80, 256])
def test_rotate(head_size: int, dtype: torch.dtype) -> None:
    fused = random(5, 7, head_size, dtype=dtype)
    cosine, sine = random(5, 1, head_size, dtype=dtype, seed=1), random(5, 1, head_size, dtype=dtype, seed=2)
    part = fused[:, 1:4]
    expected = rotate_reference(part, cosine, sine)
    assert_equal(rotate_triton(part, cosine, sine), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [24, 1030])
def test_gated_activation(size: int, activation: ActivationName, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * size, dtype=dtype) * 4
    gate_up[0, :3] = torch.tensor([-60.0, 0.0, 60.0], dtype=dtype)
    expected = gated_activation_reference(gate_up, activation)
    assert_equal(gated_activation_triton(gate_up, activation), expected)


# Sums of a few hundred products of about 1, rounded to half types; references sum in another order.
LINEAR_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 0.3}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("variant", ["plain", "bias", "residual", "factor", "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features"), [(1, 64, 48), (5, 200, 34), (40, 96, 32)]
)
def test_skinny_linear(
    num_rows: int, in_features: int, out_features: int, variant: str, dtype: torch.dtype
) -> None:
    is_gated = variant in ("silu", "gelu_tanh")
    x = random(num_rows, in_features, dtype=dtype)
    weight = random(out_features * (2 if is_gated else 1), in_features, dtype=dtype, seed=1)
    options: dict[str, Any] = {}
    if variant == "bias":
        options["bias"] = random(out_features, dtype=dtype, seed=2)
    elif variant == "residual":
        options["residual"] = random(num_rows, out_features, dtype=dtype, seed=2)
    elif variant == "factor":
        x = x / 4
        options["activation"] = "gelu_tanh"
        options["factor"] = random(num_rows, 2, out_features, dtype=dtype, seed=2)[:, 1]
    elif is_gated:
        x = x / 4
        options["activation"] = variant
    tolerance = LINEAR_TOLERANCE[dtype]
    torch.testing.assert_close(
        skinny_linear(x, weight, **options),
        skinny_linear_reference(x, weight, **options),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("num_rows", [3, 17, 33, 64, 130])
def test_a_row_of_a_skinny_product_does_not_depend_on_the_others(num_rows: int) -> None:
    x, weight = random(num_rows, 128, dtype=HALF), random(48, 128, dtype=HALF, seed=1)
    together = skinny_linear(x, weight)
    for row in (0, num_rows - 1):
        assert torch.equal(skinny_linear(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("form", "num_kv_heads", "has_value", "rotary_size"),
    [
        (None, 2, True, 32),
        ("llama", 2, True, 16),
        ("gemma4", 2, True, 32),
        ("gemma3", 1, False, 32),
        ("gemma4", 0, False, 32),
    ],
)
def test_store_heads(
    form: str | None, num_kv_heads: int, has_value: bool, rotary_size: int, dtype: torch.dtype
) -> None:
    num_tokens, num_heads, head_size = 5, 4, 32
    norms = {
        name: None if form is None else HeadNorm(random(head_size, dtype=dtype, seed=seed), FORMS[form])
        for seed, name in enumerate(("query_norm", "key_norm"))
    }
    layout = HeadLayout(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        has_value=has_value,
        value_eps=1e-6 if form == "gemma4" else None,
        **norms,
    )
    count = num_heads + num_kv_heads * (2 if has_value else 1)
    heads = random(num_tokens, count + 1, head_size, dtype=dtype)[:, :count]
    angles = random(num_tokens, 1, rotary_size, dtype=torch.float64)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    caches = [random(3, 4, max(num_kv_heads, 1), head_size, dtype=dtype, seed=seed) for seed in (7, 8)]
    before = [cache.clone() for cache in caches]
    slots = torch.tensor([2, -1, 11, 4, 0], device=DEVICE)
    query = store_heads(heads, layout, cosine, sine, caches[0], caches[1], slots)
    expected, key, value = split_heads(heads.cpu(), _on_cpu(layout), cosine.cpu(), sine.cpu())
    assert_equal(query, expected.to(DEVICE))
    for cache, old, source in zip(caches, before, (key, value), strict=True):
        wanted = old.flatten(0, 1)
        if source is not None:
            kept = slots >= 0
            wanted[slots[kept]] = source.to(DEVICE)[kept]
        assert_equal(cache.flatten(0, 1), wanted)


def _on_cpu(layout: HeadLayout) -> HeadLayout:
    """The same, so that the reference runs without kernels."""

    def move(norm: HeadNorm | None) -> HeadNorm | None:
        return None if norm is None else HeadNorm(norm.weight.cpu(), norm.form)

    return replace(layout, query_norm=move(layout.query_norm), key_norm=move(layout.key_norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize("has_next", [False, True])
def test_add_normed(has_next: bool, has_scale: bool, dtype: torch.dtype) -> None:
    x, branch = random(6, 100, dtype=dtype), random(6, 100, dtype=dtype, seed=1) * 3
    weight, next_weight = random(100, dtype=dtype, seed=2), random(100, dtype=dtype, seed=3)
    scale = torch.tensor([0.75], dtype=dtype, device=DEVICE) if has_scale else None
    options = {"scale": scale, "next_weight": next_weight if has_next else None}
    got = add_normed_triton(x, branch, weight, FORMS["gemma3"], **options)
    expected = add_normed_reference(x, branch, weight, FORMS["gemma3"], **options)
    for one, other in zip(got, expected, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_largest_logit(dtype: torch.dtype) -> None:
    logits = random(5, 20_000, dtype=dtype)[:, :18_000]
    logits[0, [700, 9_000, 17_999]] = 50.0  # equals: the lowest id
    logits[1, 17_999] = 60.0
    logits[2] = float("-inf")
    logits[3, 40] = float("nan")
    largest, token_ids = largest_logit_triton(logits)
    expected, expected_ids = largest_logit_reference(logits)
    assert token_ids[[0, 1, 4]].tolist() == expected_ids[[0, 1, 4]].tolist()
    assert torch.equal(largest[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])
    assert not largest[2:4].isfinite().any()
    assert (token_ids < 18_000).all()


@pytest.mark.parametrize(("min_n", "max_n", "k"), [(1, 1, 1), (1, 4, 5), (2, 3, 8)])
def test_ngram_lookup(min_n: int, max_n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(min_n)
    history = torch.randint(0, 3, (9, 1500), generator=generator, dtype=torch.int32)
    history[6:, :1490] = torch.arange(1490, dtype=torch.int32) + 10  # nothing repeats, but what follows
    history[7, 1200:1208] = history[7, 3:11]
    rows = torch.tensor([3, 0, 8, 7, 1, 6])
    num_tokens = torch.tensor([1, 2, 40, 1206, 1300, 1029])
    expected, is_found = ngram_lookup_reference(
        history, rows, num_tokens, max_len=1400, k=k, min_n=min_n, max_n=max_n
    )
    on_device = [tensor.to(DEVICE) for tensor in (history, rows, num_tokens)]
    drafts, found = ngram_lookup_triton(*on_device, k=k, min_n=min_n, max_n=max_n)
    assert found.tolist() == is_found.tolist()
    assert set(found.tolist()) == {False, True}
    assert drafts.tolist() == expected.tolist()


def test_tilings_of_smaller_devices_have_fewer_loads_under_way() -> None:
    large = choose_tiling(4096, 1, is_gated=True, shared_bytes=232_448)
    small = choose_tiling(4096, 1, is_gated=True, shared_bytes=101_376)  # such as Ada's
    assert (large.num_stages, small.num_stages) == (3, 2)
    assert replace(small, num_stages=3) == large
