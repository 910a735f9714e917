"""Products whose rows have the same bits whatever their number: the library's where it agrees with our kernel.

engine/layers/product_trials.py tries each shape of weights once. What a product is computed by, and with how many rows
of padding, depends on the shape and the number of rows alone, and all of it has the same bits; so a process gives a row
the same bits in every batch, and where the library agrees less, on another device or in another version of it, steps
are slower and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from engine.kernels.skinny_linear import skinny_linear
from engine.kernels.spare_rows import with_spare_rows
from engine.layers.product_trials import TRIED_ROWS, ShapePlan, library_product, make_plan

MIN_PART = 128  # rows; products with more rows than the library agrees at are cut into parts, but not into smaller ones

Shape = tuple[int, int, bool]  # out_features, in_features, has a bias


class ExactProducts:
    """Of one model. What is known of each shape."""

    def __init__(self) -> None:
        self.plans: dict[Shape, ShapePlan] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + b. x: [num_rows, in_features]; weight: [out_features, in_features]. Tries a new shape first."""
        plan = self.plans.get(shape_of(weight, bias)) or self.try_shape((weight,), bias)
        x = x.contiguous()
        num_rows = len(x)
        if not num_rows:
            return x.new_empty(0, len(weight))
        index = bisect_left(TRIED_ROWS, num_rows)
        if index >= len(plan.counts):
            return self._in_parts(x, weight, bias, plan)
        count = plan.counts[index]
        if not count:
            return skinny_linear(x, weight, bias, tiling=plan.tiling(num_rows))
        if count > num_rows:
            x = with_spare_rows(x, count)
        return library_product(x, weight, bias)[:num_rows]

    def try_shape(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> ShapePlan:
        """Of weights of one shape, and one of their biases. Syncs."""
        plan = make_plan(weights, bias)
        self.plans[shape_of(weights[0], bias)] = plan
        return plan

    def _in_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: ShapePlan
    ) -> torch.Tensor:
        """More rows than the library may have at once."""
        part = max(plan.counts, default=0)
        if part < MIN_PART:
            return skinny_linear(x, weight, bias, tiling=plan.tiling(len(x)))
        y = x.new_empty(len(x), len(weight))
        end = len(x) // part * part
        for start in range(0, end, part):
            library_product(x[start : start + part], weight, bias, out=y[start : start + part])
        if end < len(x):
            y[end:] = self.linear(x[end:], weight, bias)
        return y


def shape_of(weight: torch.Tensor, bias: torch.Tensor | None) -> Shape:
    return weight.shape[0], weight.shape[1], bias is not None
