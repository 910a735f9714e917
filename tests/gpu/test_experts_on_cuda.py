"""Routed experts on a GPU against the definition."""

from __future__ import annotations

import pytest
import torch

from engine.layers.moe import RoutedExperts

pytestmark = pytest.mark.gpu


TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-6, torch.float64: 1e-14}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 80, 200, 400, 1000], ids="{} tokens".format)
def test_experts_equal_the_definition(num_tokens: int, dtype: torch.dtype) -> None:
    """Tiles of their own, and of 16, 32, 64 and 128 rows."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_experts, hidden_size, top_k = 20, 64, 3
    device = torch.device("cuda")
    experts = RoutedExperts(num_experts, hidden_size, 96, activation="silu", dtype=dtype, device=device)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    x = torch.randn(num_tokens, hidden_size, generator=generator).to(device, dtype)
    ids = torch.stack(
        [torch.randperm(num_experts - 1, generator=generator)[:top_k] for _ in range(num_tokens)]
    )
    weights = torch.rand(num_tokens, top_k, generator=generator)
    reference = RoutedExperts(
        num_experts, hidden_size, 96, activation="silu", dtype=torch.float64, device=torch.device("cpu")
    )
    reference.load_state_dict({name: value.double().cpu() for name, value in experts.state_dict().items()})
    expected = reference(x.double().cpu(), ids, weights.double())
    actual = experts(x, ids.to(device), weights.to(device))
    assert actual.dtype == dtype
    assert (actual.double().cpu() - expected).norm() < TOLERANCE[dtype] * expected.norm()
