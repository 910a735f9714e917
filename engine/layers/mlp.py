"""The gated feed-forward block (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        parts = [("gate_proj", intermediate_size), ("up_proj", intermediate_size)]
        self.gate_up = Linear(hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.down = Linear(
            intermediate_size, [("down_proj", hidden_size)], bias=bias, dtype=dtype, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        output: torch.Tensor = self.down(F.silu(gate).mul_(up))
        return output

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.gate_up.checkpoint_tensors(prefix)
        yield from self.down.checkpoint_tensors(prefix)
