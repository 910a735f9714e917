"""Routed experts: which tokens go to which expert the model decides; here they are gathered, computed, summed up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.expert_linear import expert_linear_triton, weighted_sum_triton
from engine.kernels.gated_activation import ActivationName, gated_activation
from engine.layers.linear import is_skinny


class RoutedExperts(nn.Module):
    """Gated feed-forward experts with stacked weights, gate rows before up rows."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: ActivationName,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._activation = activation

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.gate_up = empty(num_experts, 2 * intermediate_size, hidden_size)
        self.down = empty(num_experts, hidden_size, intermediate_size)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; expert_ids: [num_tokens, k] int64, distinct in a row; weights: the same shape,
        float. Returns [num_tokens, hidden_size].

        The k outputs of a token are summed in the order of its `expert_ids`, whatever the other tokens are.
        """
        if is_skinny(x):
            return self._run_few(x, expert_ids, weights)
        num_tokens, k = expert_ids.shape
        chosen = expert_ids.flatten()
        order = torch.argsort(chosen, stable=True)  # by expert
        outputs = self._run_sorted(x[order // k], chosen[order])
        per_choice = torch.empty_like(outputs).index_copy_(0, order, outputs).view(num_tokens, k, -1)
        return (per_choice * weights[:, :, None]).sum(dim=1).to(x.dtype)

    def _run_few(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Unsorted: each row with each of its experts."""
        chosen = expert_ids.flatten()
        hidden = gated_activation(expert_linear_triton(x, self.gate_up, chosen), self._activation)
        outputs = expert_linear_triton(hidden, self.down, chosen)
        return weighted_sum_triton(outputs.view(*expert_ids.shape, -1), weights)

    def _run_sorted(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """One expert a row. x: [n, hidden_size]; expert_ids: [n] int64, ascending. Returns the shape of x."""
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
        if x.is_cpu:
            return self._run_one_by_one(x, counts.tolist())  # sync: host memory
        if x.dtype != torch.bfloat16:
            return self._run_all(x, expert_ids)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = gated_activation(F.grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends), self._activation)
        return F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)

    def _run_all(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Every expert over every row: of all dtypes the grouped product has a device form for bfloat16 only."""
        output = torch.zeros_like(x)
        for expert in range(self.num_experts):
            output = torch.where((expert_ids == expert)[:, None], self._run_expert(expert, x), output)
        return output

    def _run_one_by_one(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = []
        for expert, part in enumerate(torch.split(x, counts)):
            if len(part):
                parts.append(self._run_expert(expert, part))
        return torch.cat(parts)

    def _run_expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        hidden = gated_activation(F.linear(x, self.gate_up[expert]), self._activation)
        return F.linear(hidden, self.down[expert])
