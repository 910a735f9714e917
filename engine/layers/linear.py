"""Linear layers, plain and fused: a fused one computes several of the checkpoint's projections at once.

On a GPU, products of few rows are a kernel of our own, which also does what follows the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.gated_activation import ActivationName, gated_activation
from engine.kernels.skinny_linear import skinny_linear

MAX_SKINNY_ROWS = 16  # beyond, the library's product is faster
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
        if is_skinny(x):
            return skinny_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y. residual: [num_tokens, out_features]."""
        if is_skinny(x):
            return skinny_linear(x, self.weight, self.bias, residual=residual)
        return residual + F.linear(x, self.weight, self.bias)

    def gated(self, x: torch.Tensor, activation: ActivationName) -> torch.Tensor:
        """activation(gate) * up, where y is gate and up side by side: [num_tokens, out_features / 2]."""
        if is_skinny(x):
            return skinny_linear(x, self.weight, self.bias, activation=activation)
        return gated_activation(F.linear(x, self.weight, self.bias), activation)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, slice to load it into) of every part: "q_proj.weight" -> weight[0:q_size], ..."""
        start = 0
        for name, size in self.parts:
            yield f"{prefix}{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + size]
            start += size


def is_skinny(x: torch.Tensor) -> bool:
    """Does the product of x [num_rows, in_features] with a weight have a kernel of its own?"""
    return x.is_cuda and len(x) <= MAX_SKINNY_ROWS and x.dtype in _HALF_TYPES and x.is_contiguous()
