"""Products of pairs grouped by expert against their definition: in the interpreter on CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.gated_activation import ActivationName
from engine.kernels.grouped_linear import (
    MAX_UNSORTED_PAIRS,
    group_pairs,
    grouped_linear,
    grouped_linear_reference,
    sort_pairs,
)
from engine.kernels.skinny_linear import skinny_linear
from engine.layers.moe import RoutedExperts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, HALF)


def choose(num_rows: int, choices: int, num_experts: int) -> torch.Tensor:
    """Distinct experts of each row. Nobody chooses the first and the last one; one is chosen by most."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = []
    for _ in range(num_rows):
        some = 2 + torch.randperm(num_experts - 3, generator=generator)[: choices - 1]
        is_popular = torch.rand(1, generator=generator).item() < 0.9
        rows.append(torch.cat((torch.tensor([1 if is_popular else num_experts - 2]), some)))
    return torch.cat(rows).to(DEVICE)


@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("num_rows", "choices", "num_experts", "out_features", "in_features", "tile"),
    [
        (1, 2, 9, 24, 128, 16),
        (21, 6, 10, 40, 72, 16),
        (80, 2, 6, 17, 129, 64),
        (150, 3, 30, 32, 64, 16),
    ],
    ids=["one row", "unsorted", "tiles of 64", "tiles of 16"],
)
def test_grouped_linear(
    num_rows: int,
    choices: int,
    num_experts: int,
    out_features: int,
    in_features: int,
    tile: int,
    activation: ActivationName | None,
) -> None:
    x = random(num_rows, in_features, seed=0)
    columns = out_features if activation is None else 2 * out_features
    weight = random(num_experts, columns, in_features, seed=1) * in_features**-0.5
    expert_ids = choose(num_rows, choices, num_experts)
    expected = grouped_linear_reference(x.float(), weight.float(), expert_ids, activation=activation)
    is_chosen = torch.zeros(num_experts, dtype=torch.bool, device=DEVICE)
    is_chosen[expert_ids] = True
    weight[~is_chosen] = float("nan")  # nobody may touch it
    pairs = group_pairs(expert_ids, num_experts)
    assert pairs.tile == tile
    y = grouped_linear(x, weight, pairs, activation=activation)
    assert y.dtype == HALF
    torch.testing.assert_close(y.float(), expected, rtol=TOLERANCE[HALF], atol=TOLERANCE[HALF])


def test_many_pairs_are_sorted_by_expert() -> None:
    expert_ids = choose(100, 2, 7)
    order, ends = sort_pairs(expert_ids, 7)
    assert torch.equal(order, expert_ids.argsort(stable=True))
    assert ends.tolist() == [int((expert_ids <= expert).sum()) for expert in range(7)]
    assert group_pairs(expert_ids[:MAX_UNSORTED_PAIRS], 7).order is None
    assert group_pairs(expert_ids, 7).order is not None


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize(("num_experts", "tile"), [(12, 16), (5, 64)])
def test_a_pair_does_not_depend_on_the_others(
    num_experts: int, tile: int, activation: ActivationName | None
) -> None:
    """Tiles of its own, of 16 rows and of 64; and by the kernel that knows no experts."""
    choices = 2
    x, weight = random(90, 200, seed=0), random(num_experts, 24, 200, seed=1) * 0.1
    expert_ids = choose(90, choices, num_experts)
    pairs = group_pairs(expert_ids, num_experts)
    assert pairs.tile == tile
    together = grouped_linear(x, weight, pairs, activation=activation)
    for rows in (slice(0, 1), slice(7, 10), slice(20, 86), slice(10, 90)):
        own = expert_ids[choices * rows.start : choices * rows.stop].contiguous()
        alone = grouped_linear(x[rows], weight, group_pairs(own, num_experts), activation=activation)
        assert torch.equal(alone, together[choices * rows.start : choices * rows.stop])
    for pair in (0, 99, 179):
        row, expert = pair // choices, int(expert_ids[pair])
        by_itself = skinny_linear(x[row : row + 1], weight[expert], activation=activation)
        assert torch.equal(by_itself[0], together[pair])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("num_tokens", [3, 70])
def test_experts_on_a_device_equal_those_on_a_host(num_tokens: int, dtype: torch.dtype) -> None:
    """By the kernels that devices without a grouped product of the library run."""
    experts = RoutedExperts(7, 32, 24, activation="silu", dtype=dtype, device=DEVICE)
    experts.is_exact = dtype == HALF
    reference = RoutedExperts(7, 32, 24, activation="silu", dtype=torch.float64, device=torch.device("cpu"))
    for name, parameter in experts.named_parameters():
        parameter.copy_(random(*parameter.shape, seed=5) * 0.2)
        reference.get_parameter(name).copy_(parameter)
    x, expert_ids = random(num_tokens, 32, seed=6).to(dtype), choose(num_tokens, 2, 7)
    actual = experts._run_on_device(x, expert_ids, 2).view(num_tokens, 2, 32).double().cpu()
    for choice in range(2):
        ids = expert_ids.view(num_tokens, 2)[:, choice : choice + 1].cpu()
        expected = reference(x.double().cpu(), ids, torch.ones(num_tokens, 1, dtype=torch.float64))
        assert (actual[:, choice] - expected).norm() < TOLERANCE.get(dtype, 1e-5) * expected.norm()
