"""Which experts compute a token, in the two ways of DeepSeek: softmax shares (V2, arXiv:2405.04434) and sigmoid scores
with a correction that only steers the choice (V3, arXiv:2412.19437, section 2.1.2); both within the best groups.

Scores are float32 whatever the model's dtype, as in the reference implementations: which experts are chosen depends on
their last digits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.choose_experts import Routing, choose_experts
from engine.kernels.skinny_linear import Tiling, skinny_linear

_EXACT_TILING = Tiling(block_n=16, block_k=32, num_stages=2, num_warps=4)  # in float32, without tensor cores


class ExpertRouter(nn.Module):
    """Weights [num_experts, hidden_size] and, where there is one, a correction [num_experts]."""

    def __init__(
        self, routing: Routing, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.is_exact = False  # set where numerics are exact
        self._routing = routing
        dtype = torch.promote_types(dtype, torch.float32)
        weight = torch.empty(routing.num_experts, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.correction: nn.Parameter | None = None
        if routing.is_corrected:
            correction = torch.empty(routing.num_experts, dtype=dtype, device=device)
            self.correction = nn.Parameter(correction, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [num_tokens, hidden_size]. Returns expert ids [num_tokens, top_k] int64 and weights of the same shape,
        float32 (float64 for a float64 model)."""
        return choose_experts(self._logits(x.to(self.weight.dtype)), self.correction, self._routing)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_experts]"""
        if self.is_exact:
            return skinny_linear(x.contiguous(), self.weight, tiling=_EXACT_TILING)
        return F.linear(x, self.weight)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}weight", self.weight
        if self.correction is not None:
            yield f"{prefix}e_score_correction_bias", self.correction
