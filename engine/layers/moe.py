"""Routed experts: which tokens go to which expert the model decides; here they are gathered, computed, summed up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.gated_activation import ActivationName, gated_activation
from engine.kernels.group_pairs import group_pairs, sort_pairs_reference
from engine.kernels.grouped_linear import grouped_linear
from engine.kernels.weighted_sum import weighted_sum, weighted_sum_reference


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
        shape = (*expert_ids.shape, x.shape[1])
        if x.is_cpu:
            return weighted_sum_reference(self._run_on_host(x, expert_ids).view(shape), weights)
        outputs = self._run_on_device(x.contiguous(), expert_ids)
        return weighted_sum(outputs.view(shape), weights.contiguous())

    def _run_on_device(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """An output for each of expert_ids, row by row: [num_tokens * k, hidden_size]."""
        pairs = group_pairs(expert_ids, self.num_experts)
        hidden = grouped_linear(x, self.gate_up, pairs, activation=self._activation)
        return grouped_linear(hidden, self.down, pairs)

    def _run_on_host(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """As `_run_on_device`."""
        order, ends = sort_pairs_reference(expert_ids.flatten(), self.num_experts)
        x = x[order // expert_ids.shape[1]]
        outputs = torch.empty_like(x)
        begin = 0
        for expert, end in enumerate(ends.tolist()):  # sync: host memory
            if end > begin:
                outputs[order[begin:end]] = self._run_expert(expert, x[begin:end])
            begin = end
        return outputs

    def _run_expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        hidden = gated_activation(F.linear(x, self.gate_up[expert]), self._activation)
        return F.linear(hidden, self.down[expert])
