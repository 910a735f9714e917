"""Routed experts: which tokens go to which expert the model decides; here they are gathered, computed, summed up."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.expert_linear import expert_linear_triton, weighted_sum_triton
from engine.kernels.gated_activation import ActivationName, gated_activation
from engine.kernels.grouped_linear import group_pairs, grouped_linear, sort_pairs
from engine.layers.linear import HALF_TYPES, is_skinny


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
        self.is_exact = False  # set where numerics are exact
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
        num_tokens, k = expert_ids.shape
        chosen = expert_ids.flatten()
        if x.is_cpu:
            outputs = self._run_sorted(x, chosen, k, self._run_one_by_one)
            return (outputs.view(num_tokens, k, -1) * weights[:, :, None]).sum(dim=1).to(x.dtype)
        outputs = self._run_on_device(x.contiguous(), chosen, k)
        return weighted_sum_triton(outputs.view(num_tokens, k, -1), weights.contiguous())

    def _run_on_device(self, x: torch.Tensor, chosen: torch.Tensor, k: int) -> torch.Tensor:
        """As `_run_sorted`. In exact numerics one kernel computes any number of rows."""
        if x.dtype not in HALF_TYPES or (is_skinny(x) and not self.is_exact):
            hidden = gated_activation(expert_linear_triton(x, self.gate_up, chosen), self._activation)
            return expert_linear_triton(hidden, self.down, chosen)
        if x.dtype == torch.bfloat16 and _has_grouped_product(x.device) and not self.is_exact:
            return self._run_sorted(x, chosen, k, self._run_grouped)
        pairs = group_pairs(chosen, self.num_experts)
        hidden = grouped_linear(x, self.gate_up, pairs, activation=self._activation)
        return grouped_linear(hidden, self.down, pairs)

    def _run_sorted(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        k: int,
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; chosen: [num_tokens * k] int64, the experts token by token. Returns an output
        for each of these, [num_tokens * k, hidden_size]."""
        order, ends = sort_pairs(chosen, self.num_experts)
        outputs = run(x[order // k], ends)
        return torch.empty_like(outputs).index_copy_(0, order, outputs)

    def _run_grouped(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """x: [n, hidden_size], by expert; ends: [num_experts] int32. Returns the shape of x."""
        hidden = gated_activation(F.grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends), self._activation)
        return F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)

    def _run_one_by_one(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """As `_run_grouped`."""
        parts = []
        begin = 0
        for expert, end in enumerate(ends.tolist()):  # sync: host memory
            if end > begin:
                parts.append(self._run_expert(expert, x[begin:end]))
            begin = end
        return torch.cat(parts)

    def _run_expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        hidden = gated_activation(F.linear(x, self.gate_up[expert]), self._activation)
        return F.linear(hidden, self.down[expert])


@functools.cache
def _has_grouped_product(device: torch.device) -> bool:
    """Is the library's one launch there? Elsewhere, on later devices too, the host waits and loops over the groups."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)
