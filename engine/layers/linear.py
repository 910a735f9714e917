"""Linear layers, plain and fused: a fused one computes several of the checkpoint's projections at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn


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
        return F.linear(x, self.weight, self.bias)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, slice to load it into) of every part: "q_proj.weight" -> weight[0:q_size], ..."""
        start = 0
        for name, size in self.parts:
            yield f"{prefix}{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + size]
            start += size
