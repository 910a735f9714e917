"""The weighted sum of experts' outputs against its definition: in the interpreter on CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.weighted_sum import weighted_sum, weighted_sum_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, HALF], ids=str)
@pytest.mark.parametrize(("num_rows", "choices", "size"), [(1, 6, 512), (4, 1, 70), (7, 3, 1030)])
def test_weighted_sum(num_rows: int, choices: int, size: int, dtype: torch.dtype) -> None:
    x = random(num_rows, choices, size, dtype=dtype, seed=2)
    weights = random(num_rows, choices, dtype=torch.promote_types(dtype, torch.float32), seed=3)
    assert_equal(weighted_sum(x, weights), weighted_sum_reference(x, weights))
