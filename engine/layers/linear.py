"""Linear layers, plain and fused: a fused one computes several of the checkpoint's projections at once.

On a GPU, products of few rows are kernels of our own, which also do what follows the product, and with one row and a
small W the norm before it. All others are the library's, or in exact numerics those of engine/layers/exact_products.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.gated_activation import ActivationName, activate_times, gated_activation
from engine.kernels.resident_linear import MAX_NORMED_FEATURES, resident_linear, suits_resident
from engine.kernels.skinny_linear import skinny_linear
from engine.layers.exact_products import ExactProducts
from engine.layers.unnormed import Rows, Unnormed, normed, rows_of

MAX_SKINNY_ROWS = 16  # beyond, the library's product is faster, even with an activation and a sum beside it
HALF_TYPES = (torch.bfloat16, torch.float16)


class Linear(nn.Module):
    """y = x W^T + b. `parts`: checkpoint names of consecutive slices of the output, with their sizes."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.exact: ExactProducts | None = None  # set where numerics are exact
        out_features = sum(size for _, size in parts)
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)  # [out_features, in_features]
        self.bias: nn.Parameter | None = None  # [out_features]
        if bias:
            self.bias = nn.Parameter(
                torch.empty(out_features, dtype=dtype, device=device), requires_grad=False
            )

    def forward(self, x: Rows) -> torch.Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        if is_skinny(rows_of(x)):
            return self._skinny_product(x)
        return self._product(normed(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y. residual: [num_tokens, out_features]."""
        if is_skinny(x):
            return self._skinny_product(x, residual=residual)
        return residual + self._product(x)

    def gated(self, x: Rows, activation: ActivationName) -> torch.Tensor:
        """activation(gate) * up, where y is gate and up side by side: [num_tokens, out_features / 2]."""
        if is_skinny(rows_of(x)):
            return self._skinny_product(x, activation=activation)
        return gated_activation(self._product(normed(x)), activation)

    def activated(self, x: torch.Tensor, activation: ActivationName, factor: torch.Tensor) -> torch.Tensor:
        """activation(y) * factor. factor: [num_tokens, out_features], rows dense."""
        if is_skinny(x):
            return skinny_linear(x, self.weight, self.bias, activation=activation, factor=factor)
        return activate_times(self._product(x), factor, activation)

    def _skinny_product(
        self, x: Rows, *, activation: ActivationName | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, weight, bias = rows_of(x), self.weight, self.bias
        if not suits_resident(rows, weight, is_gated=activation is not None):
            return skinny_linear(normed(x), weight, bias, activation=activation, residual=residual)
        if isinstance(x, Unnormed) and rows.shape[1] <= MAX_NORMED_FEATURES:
            norm = x.weight, x.form
            return resident_linear(rows, weight, bias, norm=norm, activation=activation, residual=residual)
        return resident_linear(normed(x), weight, bias, activation=activation, residual=residual)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.exact is not None:
            return self.exact.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, slice to load it into) of every part: "q_proj.weight" -> weight[0:q_size], ..."""
        start = 0
        for name, size in self.parts:
            yield f"{prefix}{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + size]
            start += size


def is_skinny(x: torch.Tensor) -> bool:
    """Does a product with x [num_rows, in_features] have a kernel of its own?"""
    return x.is_cuda and len(x) <= MAX_SKINNY_ROWS and x.dtype in HALF_TYPES and x.is_contiguous()
