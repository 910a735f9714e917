"""Linear layers, plain and fused: a fused one computes several of the checkpoint's projections at once.

On a GPU, products of few rows are kernels of our own, which also do what follows the product, and with one row and a
small W the norm before it. All others are the library's; in exact numerics engine/layers/exact_products.py says whose.
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
from engine.layers.products import Activation, ShapePlan
from engine.layers.unnormed import Rows, Unnormed, normed, rows_of

MAX_SKINNY_ROWS = 16  # beyond, the library's product may be faster, even with what follows beside it
HALF_TYPES = (torch.bfloat16, torch.float16)


class Linear(nn.Module):
    """y = x W^T + b. `parts`: checkpoint names of consecutive slices of the output, with their sizes. `activation`: the
    one that `gated` or `activated` do.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        *,
        bias: bool,
        activation: Activation | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.activation = activation
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
        if self.is_by_kernel(rows_of(x)):
            return self._by_kernel(x)
        return self._by_library(normed(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y. residual: [num_tokens, out_features]."""
        if self.is_by_kernel(x):
            return self._by_kernel(x, residual=residual)
        return residual + self._by_library(x)

    def gated(self, x: Rows) -> torch.Tensor:
        """activation(gate) * up, where y is gate and up side by side: [num_tokens, out_features / 2]."""
        assert self.activation is not None
        assert self.activation.is_gated
        name = self.activation.name
        if self.is_by_kernel(rows_of(x)):
            return self._by_kernel(x, activation=name)
        return gated_activation(self._by_library(normed(x)), name)

    def activated(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """activation(y) * factor. factor: [num_tokens, out_features], rows dense."""
        assert self.activation is not None
        assert not self.activation.is_gated
        name = self.activation.name
        if self.is_by_kernel(x):
            return self._by_kernel(x, activation=name, factor=factor)
        return activate_times(self._by_library(x), factor, name)

    def is_by_kernel(self, x: torch.Tensor) -> bool:
        """Is the product with x [num_tokens, in_features] our kernel's, which also does what follows?"""
        if not x.is_cuda or x.dtype not in HALF_TYPES or not x.is_contiguous():
            return False
        if len(x) <= MAX_SKINNY_ROWS:
            return True
        return self.exact is not None and self._plan(self.exact).is_by_kernel(len(x))

    def _by_kernel(
        self,
        x: Rows,
        *,
        activation: ActivationName | None = None,
        factor: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, weight, bias = rows_of(x), self.weight, self.bias
        if factor is None and suits_resident(rows, weight, is_gated=activation is not None):
            norm = None
            if isinstance(x, Unnormed) and rows.shape[1] <= MAX_NORMED_FEATURES:
                norm = x.weight, x.form
            return resident_linear(
                normed(x) if norm is None else rows,
                weight,
                bias,
                norm=norm,
                activation=activation,
                residual=residual,
            )
        tiling = None
        if len(rows) > MAX_SKINNY_ROWS and self.exact is not None:
            tiling = self._plan(self.exact).tiling(len(rows))
        return skinny_linear(
            normed(x), weight, bias, activation=activation, factor=factor, residual=residual, tiling=tiling
        )

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        if self.exact is not None:
            return self.exact.linear(x, self.weight, self.bias, self.activation)
        return F.linear(x, self.weight, self.bias)

    def _plan(self, exact: ExactProducts) -> ShapePlan:
        return exact.plan(self.weight, self.bias, self.activation)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, slice to load it into) of every part: "q_proj.weight" -> weight[0:q_size], ..."""
        start = 0
        for name, size in self.parts:
            yield f"{prefix}{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + size]
            start += size
