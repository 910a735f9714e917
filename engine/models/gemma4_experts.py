"""The mixture of experts of Gemma 4 26B-A4B: a router over the raw residual, experts beside the dense MLP."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from engine.kernels.choose_experts import Routing, choose_experts
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts
from engine.layers.norm import GemmaRMSNorm, normalise
from engine.models.gemma_config import GemmaConfig


class GemmaRouter(nn.Module):
    """Weights of the k best experts: their softmax shares among themselves, each times its expert's own scale."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.proj = Linear(hidden_size, [("proj", num_experts)], bias=False, dtype=dtype, device=device)
        self.scale = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device), requires_grad=False)
        self.per_expert_scale = nn.Parameter(
            torch.empty(num_experts, dtype=dtype, device=device), requires_grad=False
        )
        self._routing = Routing(num_experts=num_experts, top_k=top_k, scoring="softmax", normalises=True)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [num_tokens, hidden_size]. Returns expert ids [num_tokens, k] int64 and weights of the same shape."""
        logits = self.proj(normalise(x, self._eps) * self.scale * x.shape[-1] ** -0.5)
        logits = logits.to(torch.promote_types(x.dtype, torch.float32))
        expert_ids, weights = choose_experts(logits, None, self._routing)
        return expert_ids, weights * self.per_expert_scale[expert_ids]

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.proj.checkpoint_tensors(prefix)
        yield f"{prefix}scale", self.scale
        yield f"{prefix}per_expert_scale", self.per_expert_scale


class GemmaExperts(nn.Module):
    """norm_1(dense branch) + norm_2(experts(norm(x)))."""

    def __init__(self, config: GemmaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        experts, hidden_size, eps = config.experts, config.hidden_size, config.rms_norm_eps
        assert experts is not None

        def norm() -> GemmaRMSNorm:
            return GemmaRMSNorm(hidden_size, eps, offset=config.norm_offset, dtype=dtype, device=device)

        self.router = GemmaRouter(
            hidden_size, experts.num_experts, experts.top_k, eps, dtype=dtype, device=device
        )
        self.input_norm = norm()
        self.routed = RoutedExperts(
            experts.num_experts,
            hidden_size,
            experts.intermediate_size,
            activation="gelu_tanh",
            dtype=dtype,
            device=device,
        )
        self.post_dense_norm = norm()
        self.post_experts_norm = norm()

    def forward(self, x: torch.Tensor, dense_branch: torch.Tensor) -> torch.Tensor:
        """x: the residual stream, [num_tokens, hidden_size]; dense_branch: the MLP's output, the same shape."""
        expert_ids, weights = self.router(x)
        routed = self.routed(self.input_norm(x), expert_ids, weights)
        output: torch.Tensor = self.post_dense_norm(dense_branch) + self.post_experts_norm(routed)
        return output

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.router.checkpoint_tensors(f"{prefix}router.")
        yield from self.input_norm.checkpoint_tensors(f"{prefix}pre_feedforward_layernorm_2")
        yield f"{prefix}experts.gate_up_proj", self.routed.gate_up
        yield f"{prefix}experts.down_proj", self.routed.down
        yield from self.post_dense_norm.checkpoint_tensors(f"{prefix}post_feedforward_layernorm_1")
        yield from self.post_experts_norm.checkpoint_tensors(f"{prefix}post_feedforward_layernorm_2")
