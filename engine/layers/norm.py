"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), in the forms of Llama and of Gemma.

They round differently in half types, and texts depend on it: see engine/kernels/rms_norm.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from engine.kernels.add_normed import add_normed
from engine.kernels.attention_heads import HeadNorm
from engine.kernels.norm_pairs import norm_pairs
from engine.kernels.rms_norm import NormForm, add_rms_norm, rms_norm
from engine.layers.linear import Linear
from engine.layers.unnormed import Rows, Unnormed


class RMSNorm(nn.Module):
    """y = weight * cast(x / sqrt(mean(x^2) + eps))."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )  # [size]
        self.form = NormForm(eps, rounds_first=True)

    @property
    def of_heads(self) -> HeadNorm:
        """As a norm of attention heads, which is done where they are rotated."""
        return HeadNorm(self.weight, self.form)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension of x: [..., size]; returns the same shape and dtype."""
        return rms_norm(x, self.weight, self.form)

    def add(self, x: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + branch, its norm), all of the shape of x."""
        return add_rms_norm(x, branch, self.weight, self.form)

    def pending(self, x: torch.Tensor) -> Unnormed:
        """x: [num_tokens, size], to be normed by the product that reads it, or before."""
        return Unnormed(x, self.weight, self.form)

    def pair(self, x: torch.Tensor, other: RMSNorm, y: torch.Tensor) -> torch.Tensor:
        """[self(x), other(y)]. x, y: [num_tokens, size]; returns [num_tokens, 2 * size]."""
        assert other.form == self.form, "norms of one launch have one form"
        return norm_pairs(x, self.weight, y, other.weight, self.form)

    def after(self, x: torch.Tensor, linear: Linear, inputs: torch.Tensor) -> tuple[torch.Tensor, Rows]:
        """(x + linear(inputs), its norm), in the fewest launches."""
        if linear.is_by_kernel(inputs):
            total = linear.add_to(x, inputs)
            return total, self.pending(total)
        return self.add(x, linear(inputs))

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}.weight", self.weight


class GemmaRMSNorm(RMSNorm):
    """y = cast((offset + weight) * x / sqrt(mean(x^2) + eps)).

    `offset` is 1 for Gemma 1 to 3, whose checkpoints store the deviation from one, and 0 for Gemma 4.
    """

    def __init__(
        self, size: int, eps: float, *, offset: float = 0.0, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(size, eps, dtype=dtype, device=device)
        self.form = NormForm(eps, offset=offset)

    def add_normed(
        self,
        x: torch.Tensor,
        branch: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        next_norm: GemmaRMSNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(total, next_norm(total)) with total = (x + norm(branch)) * scale; without a next norm the total twice."""
        assert next_norm is None or next_norm.form == self.form
        next_weight = None if next_norm is None else next_norm.weight
        return add_normed(x, branch, self.weight, self.form, scale=scale, next_weight=next_weight)


def normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm without a weight, over the last dimension of x."""
    return rms_norm(x, None, NormForm(eps))
