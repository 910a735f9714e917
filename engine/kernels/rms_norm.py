"""Root mean square normalisation over the last dimension, alone or after adding a branch to the residual stream.

n = x / sqrt(mean(x^2) + eps), computed in float32 (float64 for float64).
- Llama form: y = cast(n) * weight. Half types are rounded before the weight is applied.
- Gemma form: y = cast(n * (offset + weight)). Rounded once.
- without a weight: y = cast(n).
Models were trained with one of them, and texts depend on it.

Shapes: x [..., size], any strides but a dense last dimension; weight [size]; y dense, of the shape and dtype of x.
With `branch` (x and branch dense): s = x + branch first, rounded to the dtype; s is returned as well. Grid: one program
a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.row_norm import MAX_PAIRED_SIZE, inverse_rms, sum_of_squares, weighted
from engine.kernels.spare_rows import empty_with_spare_rows
from engine.kernels.triton_support import jit, next_power_of_2, sum_type, tl


@dataclass(frozen=True)
class NormForm:
    """`rounds_first`: the Llama form; else the Gemma form with this offset."""

    eps: float
    rounds_first: bool = False
    offset: float = 0.0


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, form: NormForm) -> torch.Tensor:
    """See the module docstring."""
    return rms_norm_triton(x, weight, form) if x.is_cuda else rms_norm_reference(x, weight, form)


def add_rms_norm(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, form: NormForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + branch, its norm)."""
    if x.is_cuda:
        return add_rms_norm_triton(x, branch, weight, form)
    total = x + branch
    return total, rms_norm_reference(total, weight, form)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, form: NormForm) -> torch.Tensor:
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    normalised = F.rms_norm(x.to(compute_dtype), x.shape[-1:], None, form.eps)
    if weight is None:
        return normalised.to(x.dtype)
    if form.rounds_first:
        return normalised.to(x.dtype) * weight
    return (normalised * (weight.to(compute_dtype) + form.offset)).to(x.dtype)


@jit
def _rms_norm_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    stride_outer,
    stride_inner,
    num_inner,
    eps,
    offset,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    COMPUTE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    start = (row // num_inner) * stride_outer + (row % num_inner) * stride_inner
    columns = tl.arange(0, WIDTH)
    mask = columns < SIZE
    dtype = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(COMPUTE)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + row * SIZE + columns, mask=mask, other=0.0).to(COMPUTE)
        total = (x + branch).to(dtype)
        tl.store(sum_ptr + row * SIZE + columns, total, mask=mask)
        x = total.to(COMPUTE)
    y = x * inverse_rms(sum_of_squares(x, WIDTH), eps, SIZE)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(COMPUTE)
        y = weighted(y, weight, offset, ROUNDS_FIRST, dtype)
    tl.store(y_ptr + row * SIZE + columns, y.to(dtype), mask=mask)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor | None, form: NormForm) -> torch.Tensor:
    y = empty_with_spare_rows(len(x), x.shape[1:].numel(), x).view(x.shape)
    _launch(x, None, weight, None, y, form)
    return y


def add_rms_norm_triton(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, form: NormForm
) -> tuple[torch.Tensor, torch.Tensor]:
    total, y = torch.empty_like(x), empty_with_spare_rows(len(x), x.shape[1], x)
    _launch(x, branch, weight, total, y, form)
    return total, y


def _launch(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor | None,
    total: torch.Tensor | None,
    y: torch.Tensor,
    form: NormForm,
) -> None:
    size = x.shape[-1]
    assert x.stride(-1) == 1, "the last dimension must be dense"
    assert x.dim() in (2, 3), f"got {x.dim()} dimensions, expected 2 or 3"
    num_inner, stride_inner = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    width = next_power_of_2(size)
    _rms_norm_kernel[(y.numel() // size,)](
        x,
        x if branch is None else branch,
        x if weight is None else weight,
        y if total is None else total,
        y,
        x.stride(0),
        stride_inner,
        num_inner,
        form.eps,
        form.offset,
        SIZE=size,
        WIDTH=width,
        HAS_BRANCH=branch is not None,
        HAS_WEIGHT=weight is not None,
        ROUNDS_FIRST=form.rounds_first,
        COMPUTE=sum_type(x.dtype),
        num_warps=1 if width <= MAX_PAIRED_SIZE else min(width // 256, 8),
        **launch_options(x.device),
    )
