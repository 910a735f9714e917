"""Products of pairs grouped by expert against their definition: in the interpreter on CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels import group_pairs as grouping
from engine.kernels.gated_activation import ActivationName
from engine.kernels.group_pairs import (
    LARGEST_NARROW_TILE,
    LARGEST_TILE,
    group_pairs,
    sort_pairs,
    sort_pairs_reference,
    tile_rows,
)
from engine.kernels.grouped_linear import grouped_linear, grouped_linear_reference
from engine.kernels.skinny_linear import skinny_linear
from engine.kernels.triton_support import wide_tiles_sum_alike
from engine.layers.moe import RoutedExperts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, seed: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


# In the interpreter wide tiles sum alike; of a later device, what is chosen there.
MOST = LARGEST_TILE if DEVICE.type == "cpu" or wide_tiles_sum_alike(DEVICE) else LARGEST_NARROW_TILE


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "wide_tiles_sum_alike", lambda device: MOST == LARGEST_TILE)


def choose(num_rows: int, choices: int, num_experts: int) -> torch.Tensor:
    """Distinct experts of each row. Nobody chooses the first and the last one; one is chosen by most."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = []
    for _ in range(num_rows):
        some = 2 + torch.randperm(num_experts - 3, generator=generator)[: choices - 1]
        is_popular = torch.rand(1, generator=generator).item() < 0.9
        rows.append(torch.cat((torch.tensor([1 if is_popular else num_experts - 2]), some)))
    return torch.stack(rows).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, HALF], ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("num_rows", "choices", "num_experts", "out_features", "in_features", "tile"),
    [
        (1, 2, 9, 24, 128, 16),
        (21, 6, 10, 40, 72, 16),
        (80, 2, 6, 17, 129, 32),
        (150, 3, 9, 32, 64, 64),
        (150, 3, 5, 24, 40, 128),
    ],
    ids=["one row", "tiles of 16", "tiles of 32", "tiles of 64", "tiles of 128"],
)
def test_grouped_linear(
    num_rows: int,
    choices: int,
    num_experts: int,
    out_features: int,
    in_features: int,
    tile: int,
    activation: ActivationName | None,
    dtype: torch.dtype,
) -> None:
    x = random(num_rows, in_features, seed=0, dtype=dtype)
    columns = out_features if activation is None else 2 * out_features
    weight = random(num_experts, columns, in_features, seed=1, dtype=dtype) * in_features**-0.5
    expert_ids = choose(num_rows, choices, num_experts)
    expected = grouped_linear_reference(
        x.double(), weight.double(), expert_ids.flatten(), activation=activation
    )
    is_chosen = torch.zeros(num_experts, dtype=torch.bool, device=DEVICE)
    is_chosen[expert_ids] = True
    weight[~is_chosen] = float("nan")  # nobody may touch it
    pairs = group_pairs(expert_ids, num_experts)
    assert pairs.tile == min(tile, MOST)
    y = grouped_linear(x, weight, pairs, activation=activation)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [2, 31, 400, 1500])
def test_pairs_are_sorted_by_expert(num_rows: int) -> None:
    expert_ids = choose(num_rows, 2, 7).flatten()
    order, ends = sort_pairs(expert_ids, 7)
    expected_order, expected_ends = sort_pairs_reference(expert_ids, 7)
    assert torch.equal(order, expected_order)
    assert torch.equal(ends, expected_ends)
    assert ends.tolist() == [int((expert_ids <= expert).sum()) for expert in range(7)]
    assert torch.equal(order.long(), expert_ids.argsort(stable=True))


def test_tiles_are_as_high_as_experts_have_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "wide_tiles_sum_alike", lambda device: True)
    assert [tile_rows(pairs, 8, DEVICE) for pairs in (16, 64, 127, 128, 200, 512, 9000)] == [
        16,
        16,
        16,
        32,
        32,
        128,
        128,
    ]
    monkeypatch.setattr(grouping, "wide_tiles_sum_alike", lambda device: False)
    assert tile_rows(9000, 8, DEVICE) == 32  # nothing is known of the device's wide instruction


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize(("num_experts", "tile"), [(12, 16), (8, 32), (5, 64), (4, 128)])
def test_a_pair_does_not_depend_on_the_others(
    num_experts: int, tile: int, activation: ActivationName | None, dtype: torch.dtype
) -> None:
    """Tiles of its own, and of every height; and by the kernel that knows no experts."""
    choices = 2
    num_rows = 90 if tile < 128 else 140
    x = random(num_rows, 200, seed=0, dtype=dtype)
    weight = random(num_experts, 24, 200, seed=1, dtype=dtype) * 0.1
    expert_ids = choose(num_rows, choices, num_experts)
    pairs = group_pairs(expert_ids, num_experts)
    assert pairs.tile == min(tile, MOST)
    together = grouped_linear(x, weight, pairs, activation=activation)
    for rows in (slice(0, 1), slice(7, 10), slice(20, 86), slice(10, num_rows)):
        own = group_pairs(expert_ids[rows], num_experts)
        alone = grouped_linear(x[rows], weight, own, activation=activation)
        assert torch.equal(alone, together[choices * rows.start : choices * rows.stop])
    for pair in (0, 99, 179) if dtype == HALF else ():
        row, expert = pair // choices, int(expert_ids.flatten()[pair])
        by_itself = skinny_linear(x[row : row + 1], weight[expert], activation=activation)
        assert torch.equal(by_itself[0], together[pair])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("num_tokens", [3, 70])
def test_experts_on_a_device_equal_those_on_a_host(num_tokens: int, dtype: torch.dtype) -> None:
    experts = RoutedExperts(7, 32, 24, activation="silu", dtype=dtype, device=DEVICE)
    reference = RoutedExperts(7, 32, 24, activation="silu", dtype=torch.float64, device=torch.device("cpu"))
    for name, parameter in experts.named_parameters():
        parameter.copy_(random(*parameter.shape, seed=5) * 0.2)
        reference.get_parameter(name).copy_(parameter)
    x, expert_ids = random(num_tokens, 32, seed=6).to(dtype), choose(num_tokens, 2, 7)
    actual = experts._run_on_device(x, expert_ids).view(num_tokens, 2, 32).double().cpu()
    for choice in range(2):
        ids = expert_ids[:, choice : choice + 1].cpu()
        expected = reference(x.double().cpu(), ids, torch.ones(num_tokens, 1, dtype=torch.float64))
        assert (actual[:, choice] - expected).norm() < TOLERANCE[dtype] * expected.norm()
