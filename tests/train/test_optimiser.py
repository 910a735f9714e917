"""The optimiser and the limit of a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tools.train.budget import Budget, Limit, learning_rate_scale
from tools.train.optimiser import Optimiser, OptimiserSettings, orthogonalise

SETTINGS = OptimiserSettings(learning_rate=0.02, table_learning_rate=0.02, weight_decay=0.0)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16), (1, 8, 8)])
def test_singular_values_become_about_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.4
    assert values.max() < 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_problem_is_solved_in_both_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16)).to(dtype)
    optimiser = Optimiser(model, SETTINGS, table_names=())
    inputs = torch.randn(64, 16, dtype=dtype)
    losses = []
    for step in range(150):
        loss = (model(inputs) - inputs.flip(-1)).float().square().mean()
        loss.backward()
        optimiser.step(1.0 - step / 150)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.02 * losses[0]


def test_progress_follows_the_limit_and_goes_on_from_used_time() -> None:
    now = [100.0]
    budget = Budget(Limit(seconds=10.0), used_seconds=5.0, clock=lambda: now[0])
    assert budget.progress(step=7) == 0.5
    now[0] += 5.0
    assert budget.progress(step=8) == 1.0
    assert Budget(Limit(steps=4)).progress(step=3) == 0.75
    with pytest.raises(ValueError, match="one of both"):
        Limit()


def test_the_learning_rate_rises_then_falls_to_nearly_nothing() -> None:
    scales = [learning_rate_scale(progress / 100) for progress in range(101)]
    assert scales[0] < 0.1
    assert max(scales) == pytest.approx(1.0, abs=0.01)
    assert scales[-1] <= 0.02
    assert scales[3:] == sorted(scales[3:], reverse=True)
