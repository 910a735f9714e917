"""Two rows, each with a norm of its own, side by side: what a drafter's first product reads, in one launch.

    y[t] = [norm(left[t]), norm(right[t])]

in one form of rms_norm.py. Shapes: left, right [num_rows, size], rows dense; their weights [size]; y
[num_rows, 2 * size]; all of one dtype. Sums in float32. Grid: (rows, the two).
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.rms_norm import NormForm, rms_norm_reference
from engine.kernels.row_norm import inverse_rms, sum_of_squares, weighted
from engine.kernels.triton_support import has_kernel, jit, next_power_of_2, tl


def norm_pairs(
    left: torch.Tensor,
    left_weight: torch.Tensor,
    right: torch.Tensor,
    right_weight: torch.Tensor,
    form: NormForm,
) -> torch.Tensor:
    """See the module docstring."""
    operation = norm_pairs_triton if has_kernel(left) else norm_pairs_reference
    return operation(left, left_weight, right, right_weight, form)


def norm_pairs_reference(
    left: torch.Tensor,
    left_weight: torch.Tensor,
    right: torch.Tensor,
    right_weight: torch.Tensor,
    form: NormForm,
) -> torch.Tensor:
    parts = (rms_norm_reference(left, left_weight, form), rms_norm_reference(right, right_weight, form))
    return torch.cat(parts, dim=-1)


@jit
def _norm_pairs_kernel(
    left_ptr,
    left_weight_ptr,
    right_ptr,
    right_weight_ptr,
    y_ptr,
    left_stride,
    right_stride,
    eps,
    offset,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    mask = columns < SIZE
    dtype = y_ptr.dtype.element_ty
    if side == 0:
        x = tl.load(left_ptr + row * left_stride + columns, mask=mask, other=0.0)
        weight = tl.load(left_weight_ptr + columns, mask=mask, other=0.0)
    else:
        x = tl.load(right_ptr + row * right_stride + columns, mask=mask, other=0.0)
        weight = tl.load(right_weight_ptr + columns, mask=mask, other=0.0)
    x, weight = x.to(tl.float32), weight.to(tl.float32)
    y = weighted(x * inverse_rms(sum_of_squares(x, WIDTH), eps, SIZE), weight, offset, ROUNDS_FIRST, dtype)
    tl.store(y_ptr + (row * 2 + side) * SIZE + columns, y.to(dtype), mask=mask)


def norm_pairs_triton(
    left: torch.Tensor,
    left_weight: torch.Tensor,
    right: torch.Tensor,
    right_weight: torch.Tensor,
    form: NormForm,
) -> torch.Tensor:
    num_rows, size = left.shape
    assert left.shape == right.shape
    assert left.stride(-1) == right.stride(-1) == 1
    y = left.new_empty(num_rows, 2 * size)
    width = next_power_of_2(size)
    if num_rows:
        _norm_pairs_kernel[(num_rows, 2)](
            left,
            left_weight,
            right,
            right_weight,
            y,
            left.stride(0),
            right.stride(0),
            form.eps,
            form.offset,
            SIZE=size,
            WIDTH=width,
            ROUNDS_FIRST=form.rounds_first,
            num_warps=min(max(width // 256, 1), 8),
            **launch_options(left.device),
        )
    return y
