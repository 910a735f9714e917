"""Products whose rows have the same bits whatever their number: the library's where it agrees with our kernel.

engine/layers/product_trials.py tries each shape of weights once. What a product is computed by, and with how many rows
of padding, depends on the shape, on what follows and on the number of rows alone, and all of it has the same bits; so a
process gives a row the same bits in every batch, and where the library agrees less, on another device or in another
version of it, steps are slower and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.skinny_linear import skinny_linear
from engine.kernels.spare_rows import with_spare_rows
from engine.layers.product_trials import make_plans
from engine.layers.products import Activation, Product, ShapePlan, library_product

Shape = tuple[int, int, bool, Activation | None]  # out_features, in_features, has a bias, what follows


class ExactProducts:
    """Of one model. What is known of each shape."""

    def __init__(self) -> None:
        self._plans: dict[Shape, ShapePlan] = {}

    def try_shapes(self, products: Sequence[Product]) -> None:
        """Syncs."""
        for product, plan in zip(products, make_plans(products), strict=True):
            self._plans[shape_of(product.weight, product.bias, product.activation)] = plan

    def plan(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None
    ) -> ShapePlan:
        """Tries a new shape first."""
        shape = shape_of(weight, bias, activation)
        if shape not in self._plans:
            self.try_shapes([Product((weight,), bias, activation)])
        return self._plans[shape]

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """x W^T + b alone. x: [num_rows, in_features]; weight: [out_features, in_features]."""
        num_rows, plan = len(x), self.plan(weight, bias, activation)
        if not num_rows:
            return x.new_empty(0, len(weight))
        x = x.contiguous()
        if plan.is_by_kernel(num_rows):
            tiling = plan.tiling(num_rows) if activation is None else None  # tried with what follows
            return skinny_linear(x, weight, bias, tiling=tiling)
        part = plan.largest_part
        if num_rows <= part:
            return library_product(with_spare_rows(x, plan.padded(num_rows)), weight, bias)[:num_rows]
        y = x.new_empty(num_rows, len(weight))
        end = num_rows // part * part
        for start in range(0, end, part):
            library_product(x[start : start + part], weight, bias, out=y[start : start + part])
        if end < num_rows:
            y[end:] = self.linear(x[end:], weight, bias, activation)
        return y


def shape_of(weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None) -> Shape:
    return weight.shape[0], weight.shape[1], bias is not None, activation
