"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), in the Llama form."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """y = weight * cast(x / sqrt(mean(x^2) + eps)).

    Half types are normalised in float32 and cast back *before* the weight is applied: with the other order,
    rounding differs from what the models were trained with.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )  # [size]
        self.eps = eps
        self._compute_dtype = torch.promote_types(dtype, torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension of x: [..., size]; returns the same shape and dtype."""
        normalised = F.rms_norm(x.to(self._compute_dtype), self.weight.shape, None, self.eps)
        return normalised.to(x.dtype) * self.weight

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}.weight", self.weight
