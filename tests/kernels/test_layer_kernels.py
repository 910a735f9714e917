"""Norm, rotation and gated activation: the kernels against their references, in the interpreter or compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.gated_activation import (
    ActivationName,
    gated_activation_reference,
    gated_activation_triton,
)
from engine.kernels.rms_norm import NormForm, add_rms_norm_triton, rms_norm_reference, rms_norm_triton
from engine.kernels.rotary import rotate_reference, rotate_triton

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
