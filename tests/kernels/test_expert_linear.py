"""Products with chosen experts against their definition: in the interpreter on CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.expert_linear import (
    expert_linear_reference,
    expert_linear_triton,
    weighted_sum_reference,
    weighted_sum_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def choose(num_rows: int, choices: int, num_experts: int) -> torch.Tensor:
    """Distinct experts of each row, rows one after the other; the last expert is chosen by nobody."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = [torch.randperm(num_experts - 1, generator=generator)[:choices] for _ in range(num_rows)]
    return torch.cat(rows).to(DEVICE)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "choices", "out_features", "in_features"),
    [(1, 2, 48, 256), (3, 1, 33, 40), (16, 6, 16, 300), (5, 3, 7, 513)],
)
def test_expert_linear(
    num_rows: int, choices: int, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    num_experts = 9
    x = random(num_rows, in_features, dtype=dtype, seed=0)
    weight = random(num_experts, out_features, in_features, dtype=dtype, seed=1) * in_features**-0.5
    expert_ids = choose(num_rows, choices, num_experts)
    expected = expert_linear_reference(x, weight, expert_ids)
    is_chosen = torch.zeros(num_experts, dtype=torch.bool, device=DEVICE)
    is_chosen[expert_ids] = True
    weight[~is_chosen] = float("nan")  # nobody may touch it
    assert_equal(expert_linear_triton(x, weight, expert_ids), expected)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight = random(11, 200, dtype=dtype, seed=0), random(8, 24, 200, dtype=dtype, seed=1)
    expert_ids = choose(11, 2, 8)
    together = expert_linear_triton(x, weight, expert_ids)
    for row in range(11):
        own = slice(2 * row, 2 * row + 2)
        alone = expert_linear_triton(x[row : row + 1], weight, expert_ids[own].contiguous())
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, HALF], ids=str)
@pytest.mark.parametrize(("num_rows", "choices", "size"), [(1, 6, 512), (4, 1, 70), (7, 3, 1030)])
def test_weighted_sum(num_rows: int, choices: int, size: int, dtype: torch.dtype) -> None:
    x = random(num_rows, choices, size, dtype=dtype, seed=2)
    weights = random(num_rows, choices, dtype=torch.promote_types(dtype, torch.float32), seed=3)
    assert_equal(weighted_sum_triton(x, weights), weighted_sum_reference(x, weights))
