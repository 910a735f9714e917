"""The gated feed-forward block (SwiGLU, GEGLU; Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from engine.kernels.gated_activation import ActivationName
from engine.layers.linear import Linear
from engine.layers.products import Activation
from engine.layers.unnormed import Rows


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)); gate and up are one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        activation: ActivationName = "silu",
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        parts = [("gate_proj", intermediate_size), ("up_proj", intermediate_size)]
        gate = Activation(activation, is_gated=True)
        self.gate_up = Linear(hidden_size, parts, bias=bias, activation=gate, dtype=dtype, device=device)
        self.down = Linear(
            intermediate_size, [("down_proj", hidden_size)], bias=bias, dtype=dtype, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same."""
        output: torch.Tensor = self.down(self.activate(x))
        return output

    def add_to(self, residual: torch.Tensor, x: Rows) -> torch.Tensor:
        """residual + the output, [num_tokens, hidden_size]."""
        return self.down.add_to(residual, self.activate(x))

    def activate(self, x: Rows) -> torch.Tensor:
        """What `down` is applied to: [num_tokens, intermediate_size]."""
        return self.gate_up.gated(x)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.gate_up.checkpoint_tensors(prefix)
        yield from self.down.checkpoint_tensors(prefix)
