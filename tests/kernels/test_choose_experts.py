"""The choice of experts against its definition: in the interpreter on CPU, compiled where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.choose_experts import Routing, Scoring, choose_experts_reference, choose_experts_triton

Choose = Callable[[torch.Tensor, torch.Tensor | None, Routing], tuple[torch.Tensor, torch.Tensor]]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "normalises", "groups"),
    [
        (1, 64, 6, True, (1, 1)),
        (5, 7, 3, False, (1, 1)),
        (3, 8, 1, True, (1, 1)),
        (2, 160, 8, False, (1, 1)),
        (5, 256, 8, True, (8, 4)),
        (7, 30, 3, False, (5, 2)),
        (4, 12, 4, True, (3, 3)),
        (3, 160, 6, False, (8, 3)),
    ],
)
def test_choose_experts(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    normalises: bool,
    groups: tuple[int, int],
    is_corrected: bool,
    scoring: Scoring,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=dtype).to(DEVICE)
    correction = (
        torch.randn(num_experts, generator=generator, dtype=dtype).to(DEVICE) if is_corrected else None
    )
    routing = Routing(
        num_experts=num_experts,
        top_k=top_k,
        num_groups=groups[0],
        num_chosen_groups=groups[1],
        scoring=scoring,
        is_corrected=is_corrected,
        normalises=normalises,
        scale=2.5,
    )
    expected_ids, expected_weights = choose_experts_reference(logits, correction, routing)
    expert_ids, weights = choose_experts_triton(logits, correction, routing)
    assert torch.equal(expert_ids, expected_ids)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(weights, expected_weights, rtol=tolerance, atol=tolerance)


def test_of_equals_the_lowest_ids_are_chosen() -> None:
    logits = torch.tensor([[0.5, 2.0, 0.5, 0.5, 2.0]], device=DEVICE)
    routing = Routing(num_experts=5, top_k=4, scoring="softmax", normalises=False)
    for choose in (choose_experts_reference, choose_experts_triton):
        expert_ids, _ = choose(logits, None, routing)
        assert expert_ids.tolist() == [[1, 4, 0, 2]]


@pytest.mark.parametrize("choose", [choose_experts_reference, choose_experts_triton])
@pytest.mark.parametrize("is_corrected", [False, True])
def test_experts_come_from_the_best_groups(choose: Choose, is_corrected: bool) -> None:
    """Three groups of three. By its best expert the first one is best, by its two best the second; the last expert of
    all is better than what is left in either."""
    correction = torch.zeros(9, device=DEVICE) if is_corrected else None
    one = Routing(num_experts=9, top_k=3, num_groups=3, scoring="sigmoid", normalises=False)
    logits = torch.tensor([[3.0, -9, -9, 2.9, 2.8, -9, -9, -9, 2.0]], device=DEVICE)
    expert_ids, _ = choose(logits, correction, one)
    assert expert_ids.tolist() == ([[3, 4, 5]] if is_corrected else [[0, 1, 2]])
    expert_ids, _ = choose(logits, correction, replace(one, num_chosen_groups=3))
    assert expert_ids.tolist() == [[0, 3, 4]]
    equal = torch.zeros(1, 9, device=DEVICE)
    expert_ids, _ = choose(equal, correction, replace(one, num_chosen_groups=2, top_k=6))
    assert expert_ids.tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (5, 2)], ids=["no groups", "groups"])
def test_rows_with_nan_have_experts_too(
    is_corrected: bool, scoring: Scoring, groups: tuple[int, int]
) -> None:
    logits = torch.zeros(3, 160, device=DEVICE)
    logits[0] = float("nan")
    logits[1, [7, 150]] = float("nan")
    correction = torch.full((160,), 0.5, device=DEVICE) if is_corrected else None
    routing = Routing(
        num_experts=160,
        top_k=3,
        num_groups=groups[0],
        num_chosen_groups=groups[1],
        scoring=scoring,
        normalises=True,
    )
    for choose in (choose_experts_reference, choose_experts_triton):
        expert_ids, _ = choose(logits, correction, routing)
        assert expert_ids[[0, 2]].tolist() == [[0, 1, 2]] * 2
        if scoring == "sigmoid":  # softmax makes the whole row NaN
            assert expert_ids[1].tolist() == [7, 150, 0]
