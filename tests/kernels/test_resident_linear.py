"""Products that norm their row: against the reference, and bit for bit against the norm and then the product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.gated_activation import ActivationName
from engine.kernels.resident_linear import resident_linear, resident_linear_reference, suits_resident
from engine.kernels.rms_norm import NormForm, add_rms_norm_triton, rms_norm_triton
from engine.kernels.skinny_linear import skinny_linear

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16,)  # the interpreter has no bfloat16
FORMS = {"llama": NormForm(1e-5, rounds_first=True), "gemma3": NormForm(1e-6, offset=1.0)}
SIZES = (64, 100, 576, 896, 1024)
OUT_FEATURES = 40  # two strips and a half


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def random_weight(in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Of such a size that results are about 1."""
    weight: torch.Tensor = random(OUT_FEATURES, in_features, dtype=dtype, seed=1) * in_features**-0.5
    return weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ["plain", "bias", "residual", "silu", "gelu_tanh"])
@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("in_features", [64, 100, 576])
def test_equals_the_reference(in_features: int, form: str | None, variant: str, dtype: torch.dtype) -> None:
    x, weight = random(1, in_features, dtype=dtype), random_weight(in_features, dtype)
    options: dict[str, Any] = {}
    if form is not None:
        options["norm"] = (random(in_features, dtype=dtype, seed=2), FORMS[form])
    if variant in ("silu", "gelu_tanh"):
        options |= {"activation": variant, "bias": random(OUT_FEATURES, dtype=dtype, seed=3)}
    elif variant == "bias":
        options["bias"] = random(OUT_FEATURES, dtype=dtype, seed=3)
    elif variant == "residual":
        options["residual"] = random(1, OUT_FEATURES, dtype=dtype, seed=3)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 6e-3
    torch.testing.assert_close(
        resident_linear(x, weight, **options),
        resident_linear_reference(x, weight, **options),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("in_features", SIZES)
def test_has_the_bits_of_the_norm_and_then_the_product(
    in_features: int, form: NormForm, activation: ActivationName | None, dtype: torch.dtype
) -> None:
    x, weight = random(16, in_features, dtype=dtype) * 3, random_weight(in_features, dtype)
    norm_weight = random(in_features, dtype=dtype, seed=2)
    normed = rms_norm_triton(x, norm_weight, form)
    assert torch.equal(normed, add_rms_norm_triton(x, torch.zeros_like(x), norm_weight, form)[1])
    for index in range(16) if ON_GPU else range(2):
        row = slice(index, index + 1)
        fused = resident_linear(x[row], weight, norm=(norm_weight, form), activation=activation)
        assert torch.equal(fused, resident_linear(normed[row], weight, activation=activation))
        assert torch.equal(fused, skinny_linear(normed, weight, activation=activation)[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [576, 1536, 2048])
def test_a_product_without_a_norm_has_the_bits_of_the_other_kernel(
    in_features: int, dtype: torch.dtype
) -> None:
    x, weight = random(16, in_features, dtype=dtype), random_weight(in_features, dtype)
    residual = random(16, OUT_FEATURES, dtype=dtype, seed=3)
    together = skinny_linear(x, weight, residual=residual)
    for index in (0, 7):
        row = slice(index, index + 1)
        alone = resident_linear(x[row], weight, residual=residual[row])
        assert torch.equal(alone, together[row])


@pytest.mark.parametrize(("block_n", "num_warps"), [(16, 1), (16, 2), (32, 4)])
def test_results_do_not_depend_on_the_shape_of_programs(block_n: int, num_warps: int) -> None:
    dtype = DTYPES[0]
    x, weight = random(1, 576, dtype=dtype), random_weight(576, dtype)
    norm = (random(576, dtype=dtype, seed=2), FORMS["llama"])
    expected = resident_linear(x, weight, norm=norm)
    assert torch.equal(resident_linear(x, weight, norm=norm, block_n=block_n, num_warps=num_warps), expected)


def test_is_not_chosen_where_kernels_cannot_begin_early() -> None:
    x, weight = torch.zeros(1, 64, dtype=torch.float16), torch.zeros(32, 64, dtype=torch.float16)
    assert not suits_resident(x, weight, is_gated=False)
