"""The residual stream of a decoder that norms its branches: total = x + norm(branch), and the norm of the total.

total = cast((x + cast(norm(branch))) * scale), the sum rounded before the scale; then y = norm2(total), if asked. Norms
in the Gemma form of engine/kernels/rms_norm.py. Shapes: x, branch, total, y [num_rows, size] dense; weights [size];
scale [1]. Grid: one program a row.
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.rms_norm import NormForm, rms_norm_reference
from engine.kernels.spare_rows import empty_with_spare_rows
from engine.kernels.triton_support import jit, next_power_of_2, sum_type, tl


def add_normed(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    form: NormForm,
    *,
    scale: torch.Tensor | None = None,
    next_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, its norm with `next_weight`; the total again where there is none)."""
    implementation = add_normed_triton if x.is_cuda else add_normed_reference
    return implementation(x, branch, weight, form, scale=scale, next_weight=next_weight)


def add_normed_reference(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    form: NormForm,
    *,
    scale: torch.Tensor | None = None,
    next_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + rms_norm_reference(branch, weight, form)
    if scale is not None:
        total = total * scale
    return total, total if next_weight is None else rms_norm_reference(total, next_weight, form)


@jit
def _add_normed_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    scale_ptr,
    next_weight_ptr,
    total_ptr,
    y_ptr,
    eps,
    offset,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    COMPUTE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    start = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, WIDTH)
    mask = columns < SIZE
    dtype = total_ptr.dtype.element_ty
    branch = tl.load(branch_ptr + start + columns, mask=mask, other=0.0).to(COMPUTE)
    x = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(COMPUTE)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(COMPUTE)
    branch = branch * (1.0 / tl.sqrt(tl.sum(branch * branch, axis=0) / SIZE + eps)) * (weight + offset)
    total = (x + branch.to(dtype).to(COMPUTE)).to(dtype)
    if HAS_SCALE:
        total = (total.to(COMPUTE) * tl.load(scale_ptr).to(COMPUTE)).to(dtype)
    tl.store(total_ptr + start + columns, total, mask=mask)
    if HAS_NEXT:
        y = total.to(COMPUTE)
        next_weight = tl.load(next_weight_ptr + columns, mask=mask, other=0.0).to(COMPUTE)
        y = y * (1.0 / tl.sqrt(tl.sum(y * y, axis=0) / SIZE + eps)) * (next_weight + offset)
        tl.store(y_ptr + start + columns, y.to(dtype), mask=mask)


def add_normed_triton(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    form: NormForm,
    *,
    scale: torch.Tensor | None = None,
    next_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert not form.rounds_first, "of the two forms only Gemma's is used in this way"
    x, branch = x.contiguous(), branch.contiguous()
    total = torch.empty_like(x)
    y = total if next_weight is None else empty_with_spare_rows(len(x), x.shape[1], x)
    size = x.shape[-1]
    width = next_power_of_2(size)
    _add_normed_kernel[(x.numel() // size,)](
        x,
        branch,
        weight,
        x if scale is None else scale,
        x if next_weight is None else next_weight,
        total,
        y,
        form.eps,
        form.offset,
        SIZE=size,
        WIDTH=width,
        HAS_SCALE=scale is not None,
        HAS_NEXT=next_weight is not None,
        COMPUTE=sum_type(x.dtype),
        num_warps=min(max(width // 256, 1), 8),
        **launch_options(x.device),
    )
    return total, y
