"""The choice of experts against its definition: in the interpreter on CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.kernels.choose_experts import Scoring, choose_experts_reference, choose_experts_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "normalises"),
    [(1, 64, 6, True), (5, 7, 3, False), (3, 8, 1, True), (2, 160, 8, False)],
)
def test_choose_experts(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    normalises: bool,
    is_corrected: bool,
    scoring: Scoring,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=dtype).to(DEVICE)
    correction = (
        torch.randn(num_experts, generator=generator, dtype=dtype).to(DEVICE) if is_corrected else None
    )
    arguments = {"top_k": top_k, "scoring": scoring, "normalises": normalises, "scale": 2.5}
    expected_ids, expected_weights = choose_experts_reference(logits, correction, **arguments)  # type: ignore[arg-type]
    expert_ids, weights = choose_experts_triton(logits, correction, **arguments)  # type: ignore[arg-type]
    assert torch.equal(expert_ids, expected_ids)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(weights, expected_weights, rtol=tolerance, atol=tolerance)


def test_of_equals_the_lowest_ids_are_chosen() -> None:
    logits = torch.tensor([[0.5, 2.0, 0.5, 0.5, 2.0]], device=DEVICE)
    for choose in (choose_experts_reference, choose_experts_triton):
        expert_ids, _ = choose(logits, None, top_k=4, scoring="softmax", normalises=False, scale=1.0)
        assert expert_ids.tolist() == [[1, 4, 0, 2]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_corrected", [False, True])
def test_rows_with_nan_have_experts_too(is_corrected: bool, scoring: Scoring) -> None:
    logits = torch.zeros(3, 160, device=DEVICE)
    logits[0] = float("nan")
    logits[1, [7, 150]] = float("nan")
    correction = torch.full((160,), 0.5, device=DEVICE) if is_corrected else None
    for choose in (choose_experts_reference, choose_experts_triton):
        expert_ids, _ = choose(logits, correction, top_k=3, scoring=scoring, normalises=True, scale=1.0)
        assert expert_ids[[0, 2]].tolist() == [[0, 1, 2]] * 2
        if scoring == "sigmoid":  # softmax makes the whole row NaN
            assert expert_ids[1].tolist() == [7, 150, 0]
