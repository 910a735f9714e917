"""Linear layers, plain and fused: a fused one computes several of the checkpoint's projections at once.

On a GPU, products of few rows are a kernel of our own, which also does what follows the product. All others are the
library's, or in exact numerics those of engine/layers/exact_products.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.gated_activation import ActivationName, activate, gated_activation
from engine.kernels.skinny_linear import MAX_ROWS, skinny_linear
from engine.layers.exact_products import ExactProducts

MAX_SKINNY_ROWS = 16  # beyond, the library's product of a large weight is faster
MAX_SMALL_ROWS = (
    MAX_ROWS  # of products with a small weight: beside those, separate activations and sums cost most
)
SMALL_WEIGHT_BYTES = 8 << 20
_HALF_TYPES = (torch.bfloat16, torch.float16)


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        if is_skinny(x, self.weight):
            return skinny_linear(x, self.weight, self.bias)
        return self._product(x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y. residual: [num_tokens, out_features]."""
        if is_skinny(x, self.weight):
            return skinny_linear(x, self.weight, self.bias, residual=residual)
        return residual + self._product(x)

    def gated(self, x: torch.Tensor, activation: ActivationName) -> torch.Tensor:
        """activation(gate) * up, where y is gate and up side by side: [num_tokens, out_features / 2]."""
        if is_skinny(x, self.weight):
            return skinny_linear(x, self.weight, self.bias, activation=activation)
        return gated_activation(self._product(x), activation)

    def activated(self, x: torch.Tensor, activation: ActivationName, factor: torch.Tensor) -> torch.Tensor:
        """activation(y) * factor. factor: [num_tokens, out_features], rows dense."""
        if (
            is_skinny(x, self.weight) or self.exact is not None
        ):  # the library rounds activations in another way
            return skinny_linear(x, self.weight, self.bias, activation=activation, factor=factor)
        return activate(self._product(x), activation) * factor

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


def is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Does the product of x [num_rows, in_features] with the weight have a kernel of its own?"""
    most = MAX_SMALL_ROWS if weight.nbytes <= SMALL_WEIGHT_BYTES else MAX_SKINNY_ROWS
    return x.is_cuda and len(x) <= most and x.dtype in _HALF_TYPES and x.is_contiguous()
