"""Norm, rotation, gated activation, weighted sum: kernels against their references, in the interpreter or compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.add_normed import add_normed_reference, add_normed_triton
from engine.kernels.attention_heads import HeadLayout, HeadNorm, split_heads, store_heads
from engine.kernels.gated_activation import (
    ActivationName,
    activate_times_reference,
    activate_times_triton,
)
from engine.kernels.largest_logit import largest_logit_reference, largest_logit_triton
from engine.kernels.ngram_lookup import ngram_lookup_reference, ngram_lookup_triton
from engine.kernels.rms_norm import NormForm, add_rms_norm_triton, rms_norm_reference, rms_norm_triton
from engine.kernels.rotary import rotate_reference, rotate_triton
from engine.kernels.rotary_tables import rotary_tables_reference, rotary_tables_triton
from engine.kernels.skinny_linear import choose_tiling, skinny_linear, skinny_linear_reference
from engine.kernels.weighted_sum import weighted_sum, weighted_sum_reference

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
    cosine, sine = (random(5, 1, head_size // 2, dtype=dtype, seed=seed) for seed in (1, 2))
    part = fused[:, 1:4]
    expected = rotate_reference(part, cosine, sine)
    assert_equal(rotate_triton(part, cosine, sine), expected)


@pytest.mark.parametrize("num_heads", [1, 70])
def test_rotate_of_one_and_of_many_heads(num_heads: int) -> None:
    x = random(3, num_heads, 64, dtype=HALF)
    cosine, sine = (random(3, 1, 32, dtype=HALF, seed=seed) for seed in (1, 2))
    turned = rotate_triton(x, cosine, sine)
    assert_equal(turned, rotate_reference(x, cosine, sine))
    assert torch.equal(rotate_triton(x[1:2], cosine[1:2], sine[1:2])[0], turned[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [6, 64, 256])
def test_rotary_tables(size: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 2, 77, 4095, 131_071, 262_143], device=DEVICE).repeat(3)[::3]
    frequencies = 1e6 ** -torch.linspace(0, 1, size, device=DEVICE)
    frequencies[-1] = 0.0  # a feature that does not turn
    tables = rotary_tables_triton(positions, frequencies, 1.25, dtype)
    expected = rotary_tables_reference(positions.cpu(), frequencies.cpu(), 1.25, dtype)
    exact = (positions.cpu()[:, None, None].float() * frequencies.cpu()).double()  # the rounded angle
    for table, reference, exactly in zip(tables, expected, (exact.cos(), exact.sin()), strict=True):
        assert table.shape == (len(positions), 1, size)
        tolerance = max(TOLERANCE[dtype], 4e-7)  # cosines are of float32 in every dtype
        torch.testing.assert_close(table.cpu(), reference, rtol=0, atol=tolerance)
        torch.testing.assert_close(table.cpu().double(), exactly * 1.25, rtol=0, atol=tolerance)
    alone = rotary_tables_triton(positions[3:4], frequencies, 1.25, dtype)
    assert all(torch.equal(one[0], table[3]) for one, table in zip(alone, tables, strict=True))


@pytest.mark.parametrize("size", [576, 1024, 2048, 5376])
def test_a_norm_after_a_sum_has_the_bits_of_the_norm_alone(size: int) -> None:
    dtype = DTYPES[-1]
    x, branch, weight = random(5, size, dtype=dtype), random(5, size, dtype=dtype), random(size, dtype=dtype)
    form = NormForm(1e-5, rounds_first=True)
    total, normed = add_rms_norm_triton(x, branch, weight, form)
    assert torch.equal(normed, rms_norm_triton(total, weight, form))
    assert torch.equal(normed[2:3], rms_norm_triton(total[2:3], weight, form))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [24, 1030])
def test_gated_activation(size: int, activation: ActivationName, dtype: torch.dtype) -> None:
    gate, factor = (random(3, 2 * size, dtype=dtype) * 4).chunk(2, dim=-1)
    gate[0, :3] = torch.tensor([-60.0, 0.0, 60.0], dtype=dtype)
    expected = activate_times_reference(gate, factor, activation)
    assert_equal(activate_times_triton(gate, factor, activation), expected)
    assert_equal(activate_times_triton(gate, factor.contiguous(), activation), expected)


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
    x, weight = random(num_rows, 1152, dtype=HALF), random(48, 1152, dtype=HALF, seed=1)
    together = skinny_linear(x, weight)
    for row in (0, num_rows - 1):
        assert torch.equal(skinny_linear(x[row : row + 1], weight)[0], together[row])


@dataclass(frozen=True)
class HeadCase:
    form: str | None
    num_heads: int = 4
    num_kv_heads: int = 2
    has_value: bool = True
    head_size: int = 32
    rotary_size: int = 32

    def make(
        self, num_tokens: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, HeadLayout, list[torch.Tensor]]:
        """(heads, layout, [cosine, sine]). Behind the heads of a token there is another one, of NaN."""
        norms = {
            name: None if self.form is None else HeadNorm(weight, FORMS[self.form])
            for name, weight in (
                ("query_norm", random(self.head_size, dtype=dtype, seed=0)),
                ("key_norm", random(self.head_size, dtype=dtype, seed=1)),
            )
        }
        value_eps = 1e-6 if self.form == "gemma4" else None
        layout = HeadLayout(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            has_value=self.has_value,
            value_eps=value_eps,
            **norms,
        )
        count = self.num_heads + self.num_kv_heads * (2 if self.has_value else 1)
        fused = random(num_tokens, count + 1, self.head_size, dtype=dtype)
        fused[:, count] = float("nan")
        angles = random(num_tokens, 1, self.rotary_size // 2, dtype=torch.float64)
        return fused[:, :count], layout, [angles.cos().to(dtype), angles.sin().to(dtype)]


HEAD_CASES = {
    "plain": HeadCase(None),
    "partly rotated": HeadCase("llama", rotary_size=16),
    "partly rotated, plain": HeadCase(None, rotary_size=16),
    "partly rotated, normed values": HeadCase("gemma4", head_size=48, rotary_size=16),
    "normed values": HeadCase("gemma4"),
    "the raw key is the value": HeadCase("gemma3", num_kv_heads=1, has_value=False),
    "no keys": HeadCase("gemma4", num_kv_heads=0, has_value=False),
    "odd, one tile": HeadCase(None, num_heads=9, num_kv_heads=3, head_size=64, rotary_size=64),
    "odd, several tiles": HeadCase("gemma4", num_heads=9, num_kv_heads=3, head_size=256, rotary_size=256),
    "a size between": HeadCase("llama", num_heads=5, num_kv_heads=1, head_size=80, rotary_size=80),
    "wide": HeadCase("gemma3", num_heads=5, num_kv_heads=1, has_value=False, head_size=512, rotary_size=512),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", HEAD_CASES.values(), ids=HEAD_CASES)
def test_store_heads(case: HeadCase, dtype: torch.dtype) -> None:
    heads, layout, rotation = case.make(5, dtype)
    cache_shape = 3, 4, max(case.num_kv_heads, 1), case.head_size
    caches = [random(*cache_shape, dtype=dtype, seed=seed) for seed in (7, 8)]
    before = [cache.clone() for cache in caches]
    slots = torch.tensor([2, -1, 11, 4, 0], device=DEVICE)
    query = store_heads(heads, layout, *rotation, caches[0], caches[1], slots)
    expected, key, value = split_heads(heads.cpu(), _on_cpu(layout), *(table.cpu() for table in rotation))
    assert_equal(query, expected.to(DEVICE))
    for cache, old, source in zip(caches, before, (key, value), strict=True):
        wanted = old.flatten(0, 1)
        if source is not None:
            kept = slots >= 0
            wanted[slots[kept]] = source.to(DEVICE)[kept]
        assert_equal(cache.flatten(0, 1), wanted)


@pytest.mark.parametrize("case", ["odd, one tile", "odd, several tiles", "partly rotated"])
def test_heads_of_a_token_do_not_depend_on_the_other_tokens(case: str) -> None:
    """Bit for bit, in steps of any size."""
    most = 300
    heads, layout, rotation = HEAD_CASES[case].make(most, HALF)
    shape = most, 1, layout.num_kv_heads, heads.shape[-1]

    def run(tokens: slice) -> list[torch.Tensor]:
        caches = [torch.zeros(shape, dtype=HALF, device=DEVICE) for _ in range(2)]
        slots = torch.arange(most, device=DEVICE)[tokens]
        query = store_heads(heads[tokens], layout, *(table[tokens] for table in rotation), *caches, slots)
        return [query, *(cache[tokens, 0] for cache in caches)]

    together = run(slice(0, most))
    for num_tokens in (1, 5, 16, 17):
        tokens = slice(most - num_tokens, most)
        for some, of_all in zip(run(tokens), together, strict=True):
            assert torch.equal(some, of_all[tokens])


def test_values_without_a_norm_are_stored_as_they_are() -> None:
    heads, layout, rotation = HEAD_CASES["plain"].make(2, torch.float32)
    heads[0, -2, [0, 1, 16]] = torch.tensor([3e38, -0.0, -0.0], device=DEVICE)
    caches = [torch.zeros(2, 1, 2, 32, device=DEVICE) for _ in range(2)]
    store_heads(heads, layout, *rotation, *caches, torch.arange(2, device=DEVICE))
    stored = caches[1][:, 0]
    assert torch.equal(stored.view(torch.int32), heads[:, -2:].contiguous().view(torch.int32))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "choices", "size"), [(1, 6, 512), (4, 1, 70), (7, 3, 1030)])
def test_weighted_sum(num_rows: int, choices: int, size: int, dtype: torch.dtype) -> None:
    x = random(num_rows, choices, size, dtype=dtype, seed=2)
    weights = random(num_rows, choices, dtype=torch.promote_types(dtype, torch.float32), seed=3)
    assert_equal(weighted_sum(x, weights), weighted_sum_reference(x, weights))


def test_tilings_of_smaller_devices_have_fewer_loads_under_way() -> None:
    for is_gated, shared_bytes in ((False, 65_536), (True, 49_152)):
        large = choose_tiling(4096, 4096, 1, is_gated, shared_bytes=232_448)  # Hopper's
        small = choose_tiling(4096, 4096, 1, is_gated, shared_bytes)
        assert (large.num_stages, small.num_stages) == (3, 2)
        assert replace(small, num_stages=3) == large
