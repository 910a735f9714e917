"""The weighted sum of what the experts of a row gave.

y[i] = cast(weights[i, 0] * x[i, 0] + weights[i, 1] * x[i, 1] + ...), in this order, in float32 (float64 for float64).

Shapes: x [num_rows, choices, size], weights [num_rows, choices] float, y [num_rows, size]. All dense. Grid: (rows,
column tiles).
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit, sum_type, tl

BLOCK = 512


def weighted_sum_reference(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (x * weights[:, :, None]).sum(dim=1).to(x.dtype)


@jit
def _weighted_sum_kernel(
    x_ptr,
    weights_ptr,
    y_ptr,
    CHOICES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM_TYPE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < SIZE
    acc = tl.zeros([BLOCK], SUM_TYPE)
    for choice in range(CHOICES):
        pair = row * CHOICES + choice
        weight = tl.load(weights_ptr + pair).to(SUM_TYPE)
        acc += weight * tl.load(x_ptr + pair * SIZE + columns, mask=valid, other=0.0).to(SUM_TYPE)
    tl.store(y_ptr + row * SIZE + columns, acc.to(y_ptr.dtype.element_ty), mask=valid)


def weighted_sum(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    num_rows, choices, size = x.shape
    assert x.is_contiguous()
    assert weights.is_contiguous()
    y = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    _weighted_sum_kernel[(num_rows, -(-size // BLOCK))](
        x,
        weights,
        y,
        CHOICES=choices,
        SIZE=size,
        BLOCK=BLOCK,
        SUM_TYPE=sum_type(x.dtype),
        num_warps=4,
        **launch_options(x.device),
    )
    return y
