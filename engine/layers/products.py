"""Products with weights of one shape: by whom they can be computed, and what was found out about it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.gated_activation import ActivationName, activate_times, gated_activation
from engine.kernels.skinny_linear import MAX_ROWS, Tiling, skinny_linear

# What the library may be asked for: so many rows more cost little, and trials take time at start-up.
TRIED_ROWS = (1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32), *range(1152, 4097, 128))

MIN_PART = 128  # rows; products with more rows than the library agrees at are cut into parts, but not into smaller ones


@dataclass(frozen=True)
class Activation:
    """What follows a product: of half of its columns, times the other half; or of all, times a factor."""

    name: ActivationName
    is_gated: bool


@dataclass(frozen=True)
class Product:
    """Our kernel does what follows in its launch, behind the library's it is one more."""

    weights: Sequence[torch.Tensor]  # [out_features, in_features]; the more, the less of them a cache holds
    bias: torch.Tensor | None = None
    activation: Activation | None = None

    @property
    def weight(self) -> torch.Tensor:
        return self.weights[0]

    @property
    def is_gated(self) -> bool:
        return self.activation is not None and self.activation.is_gated

    @property
    def num_columns(self) -> int:
        """Of the result, behind what follows."""
        return len(self.weight) // (2 if self.is_gated else 1)

    def factors(self, x: torch.Tensor) -> torch.Tensor | None:
        """All ones, where there is to be a factor. x: [num_rows, in_features]; returns [num_rows, out_features]."""
        if self.activation is None or self.is_gated:
            return None
        return x.new_ones(len(x), len(self.weight))

    def by_kernel(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        tiling: Tiling | None = None,
        factor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [num_rows, in_features]; factor: `factors` of x."""
        name = None if self.activation is None else self.activation.name
        return skinny_linear(x, weight, self.bias, activation=name, factor=factor, tiling=tiling)

    def by_library(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        y = library_product(x, weight, self.bias, out=out)
        if self.activation is None:
            return
        if self.is_gated:
            gated_activation(y, self.activation.name)
        else:
            activate_times(y, y, self.activation.name)


@dataclass(frozen=True)
class ShapePlan:
    """What computes the products with weights of one shape that the same follows."""

    counts: tuple[int, ...]  # for up to TRIED_ROWS[i] rows: of the library, so many; 0: our kernel
    few: Tiling | None = None  # of our kernel, for more than 16 rows up to one tile
    many: Tiling | None = None  # for more

    def is_by_kernel(self, num_rows: int) -> bool:
        """Else it is the library's, in parts where there are more rows than in `counts`."""
        index = bisect_left(TRIED_ROWS, num_rows)
        if index < len(self.counts):
            return self.counts[index] == 0
        return self.largest_part < MIN_PART

    @property
    def largest_part(self) -> int:
        """Rows that the library may have at once."""
        return max(self.counts, default=0)

    def padded(self, num_rows: int) -> int:
        """Rows that the library gets for so many, no more than `largest_part`."""
        return self.counts[bisect_left(TRIED_ROWS, num_rows)]

    def tiling(self, num_rows: int) -> Tiling | None:
        """Of our kernel."""
        return None if num_rows <= 16 else self.few if num_rows <= MAX_ROWS else self.many


def library_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b by the library, by the same calls whoever asks."""
    if out is None:
        out = x.new_empty(len(x), len(weight))
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)
