"""Rows that are still to be normed: a small product of one row does so in its launch, all others ask for `normed`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.rms_norm import NormForm, rms_norm


@dataclass(frozen=True)
class Unnormed:
    """What is meant is norm(rows): [num_rows, size]."""

    rows: torch.Tensor  # [num_rows, size]
    weight: torch.Tensor  # [size]
    form: NormForm


Rows = torch.Tensor | Unnormed


def rows_of(x: Rows) -> torch.Tensor:
    """[num_rows, size], normed or not."""
    return x.rows if isinstance(x, Unnormed) else x


def normed(x: Rows) -> torch.Tensor:
    """[num_rows, size]."""
    return rms_norm(x.rows, x.weight, x.form) if isinstance(x, Unnormed) else x
