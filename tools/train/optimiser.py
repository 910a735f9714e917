"""The optimiser of all training here: Muon for matrices, AdamW for the rest, on float32 copies of half-type weights.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) steps along the orthogonalised momentum of a matrix. Its
steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so both take one learning rate. Matrices of
one shape are orthogonalised together: there are few launches, however deep the model is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_RMS_OF_ADAMW = 0.2  # size of an entry of an AdamW step, in learning rates


@dataclass(frozen=True, kw_only=True)
class OptimiserSettings:
    learning_rate: float
    table_learning_rate: float  # of everything but matrices between layers: tables, norms, scalars
    weight_decay: float = 0.05  # of matrices
    table_weight_decay: float = 0.0  # of tables; norms and scalars have none
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """[n, rows, columns] -> about the nearest matrices whose singular values are one, by a quintic iteration."""
    a, b, c = _NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    x: torch.Tensor = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x


class Optimiser:
    """Takes the gradients of a module and steps it. `table_names`: parts of names of matrices that are tables."""

    def __init__(self, module: nn.Module, settings: OptimiserSettings, table_names: Iterable[str]) -> None:
        self._settings = settings
        self._params: list[torch.Tensor] = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        self._masters = [
            parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for parameter in self._params
        ]
        is_table = [
            parameter.ndim != 2 or any(part in name for part in table_names)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        shapes: dict[torch.Size, list[int]] = defaultdict(list)
        for index, master in enumerate(self._masters):
            if not is_table[index]:
                shapes[master.shape].append(index)
        self._matrices = list(shapes.values())
        self._momenta = [torch.zeros_like(master) for master in self._masters]
        self._tables = [index for index, found in enumerate(is_table) if found]
        fused = self._masters[0].is_cuda
        tables = [self._masters[index] for index in self._tables if self._masters[index].ndim == 2]
        others = [self._masters[index] for index in self._tables if self._masters[index].ndim != 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": tables, "weight_decay": settings.table_weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.table_learning_rate,
            betas=settings.betas,
            fused=fused,
        )

    @torch.no_grad()
    def step(self, scale: float) -> torch.Tensor:
        """One step with the learning rates times `scale`. Returns the norm of the gradient, before it was limited."""
        grads = [torch.empty_like(master) for master in self._masters]
        torch._foreach_copy_(grads, [_gradient(parameter) for parameter in self._params])
        norm: torch.Tensor = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (self._settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        for indices in self._matrices:
            self._step_matrices(indices, grads, scale)
        for index in self._tables:
            self._masters[index].grad = grads[index]
        for group in self._adamw.param_groups:
            group["lr"] = self._settings.table_learning_rate * scale
        self._adamw.step()
        torch._foreach_copy_(self._params, self._masters)
        for parameter in self._params:
            parameter.grad = None
        return norm

    def _step_matrices(self, indices: list[int], grads: list[torch.Tensor], scale: float) -> None:
        settings = self._settings
        momenta, own = [self._momenta[i] for i in indices], [grads[i] for i in indices]
        torch._foreach_lerp_(momenta, own, 1.0 - settings.momentum)
        ahead = torch._foreach_lerp(own, momenta, settings.momentum)  # Nesterov's
        stacked = torch.stack(list(ahead))
        steps = orthogonalise(stacked.bfloat16() if stacked.is_cuda else stacked).to(stacked.dtype)
        learning_rate = settings.learning_rate * scale
        masters = [self._masters[i] for i in indices]
        torch._foreach_mul_(masters, 1.0 - learning_rate * settings.weight_decay)
        size = _RMS_OF_ADAMW * max(stacked.shape[1:]) ** 0.5
        torch._foreach_add_(masters, list(steps.unbind()), alpha=-learning_rate * size)

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self._masters, "momenta": self._momenta, "adamw": self._adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also puts the weights into the module."""
        torch._foreach_copy_(self._masters, [value.to(self._masters[0].device) for value in state["masters"]])
        torch._foreach_copy_(self._momenta, [value.to(self._momenta[0].device) for value in state["momenta"]])
        self._adamw.load_state_dict(state["adamw"])
        torch._foreach_copy_(self._params, self._masters)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
