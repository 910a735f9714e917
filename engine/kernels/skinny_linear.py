"""y = x W^T for few rows, with what follows it in the same launch: a bias, a gated activation, or a residual sum.

With few rows a product costs the reading of W. Each program streams a strip of W and meets it with all rows of a tile
of 16, 32 or 64. The products of a row are summed in the order of K, by the same instruction at every number of rows
(mma.sync m16n8k16, which Triton uses for tiles of fewer than 64 rows or of two warps): its result does not depend on
its neighbours, nor on how many there are.

A program asks for its first strips of W while the kernel before still runs (dependent_launch.py), and lets the next one
begin when it has read all: programs of the next are then placed on all multiprocessors alike. Begun before, they share
those that happen to be free, and read W from there.

- plain: y = cast(x W^T) (+ bias before the cast).
- gated: W holds gate rows, then up rows; y = cast(cast(activation(cast(gate))) * cast(up)).
- with a factor: y = cast(cast(activation(cast(x W^T))) * factor).
- residual: y = residual + cast(x W^T).
Roundings stand where the separate operations have them. Sums in float32.

Shapes: x [num_rows, in_features] dense; weight [out_features, in_features] dense; bias [out_features]; factor
[num_rows, out_features], rows dense; residual, y [num_rows, out_features], gated: y [num_rows, out_features / 2]. Grid:
(row tiles, column tiles).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.kernels.dependent_launch import (
    launch_options,
    let_next_begin,
    wait_for_previous,
    zero_after_previous,
)
from engine.kernels.gated_activation import (
    ACTIVATION_CODES,
    ActivationName,
    activate_times_reference,
    activated,
)
from engine.kernels.spare_rows import empty_with_spare_rows
from engine.kernels.triton_support import jit, next_power_of_2, shared_memory_bytes, tl

MAX_ROWS = 64  # of a tile
MANY_COLUMNS = 65536  # as heads have


@dataclass(frozen=True)
class Tiling:
    """Columns of W^T and steps of K of a program; how many loads are under way; warps."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


def skinny_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationName | None = None,
    factor: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    y = F.linear(x, weight, bias)
    if activation is not None:
        gate, factor = y.chunk(2, dim=-1) if factor is None else (y, factor)
        y = activate_times_reference(gate, factor, activation)
    return y if residual is None else residual + y


@jit(do_not_specialize_on_alignment=["num_rows"])
def _skinny_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    factor_ptr,
    residual_ptr,
    y_ptr,
    num_rows,
    factor_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # 0: none, 1: silu, 2: gelu_tanh
    OVERLAPS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    row_valid = rows < num_rows
    column_valid = columns < N
    valid = row_valid[:, None] & column_valid[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_start = x_ptr + rows[:, None].to(tl.int64) * K
    weight_start = weight_ptr + columns[None, :].to(tl.int64) * K
    for k in range(0, K, BLOCK_K):
        ks = k + inner
        if K % BLOCK_K == 0:
            weight = tl.load(
                weight_start + ks[:, None],
                mask=column_valid[None, :],
                other=0.0,
                eviction_policy="evict_first",  # read once, or by the next row tile right away
            )
        else:
            weight = tl.load(
                weight_start + ks[:, None], mask=column_valid[None, :] & (ks < K)[:, None], other=0.0
            )
        if IS_GATED:
            up_start = weight_start + N * K
            if K % BLOCK_K == 0:
                up = tl.load(
                    up_start + ks[:, None],
                    mask=column_valid[None, :],
                    other=0.0,
                    eviction_policy="evict_first",
                )
            else:
                up = tl.load(
                    up_start + ks[:, None], mask=column_valid[None, :] & (ks < K)[:, None], other=0.0
                )
        ks += zero_after_previous(k, OVERLAPS) * 16  # known to be a multiple, so that loads stay wide
        if K % BLOCK_K == 0:
            x = tl.load(x_start + ks[None, :], mask=row_valid[:, None], other=0.0)
        else:
            x = tl.load(x_start + ks[None, :], mask=row_valid[:, None] & (ks < K)[None, :], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        if IS_GATED:
            acc_up = tl.dot(x, up, acc_up, input_precision="ieee")
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)
    dtype = y_ptr.dtype.element_ty
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=column_valid, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            acc_up += tl.load(bias_ptr + N + columns, mask=column_valid, other=0.0).to(tl.float32)[None, :]
    y = acc.to(dtype)
    if ACTIVATION > 0:
        gate = activated(y.to(tl.float32), ACTIVATION == 1).to(dtype)
        factor = acc_up.to(dtype)
        if HAS_FACTOR:
            factor_start = factor_ptr + rows[:, None].to(tl.int64) * factor_stride
            factor = tl.load(factor_start + columns[None, :], mask=valid, other=0.0)
        y = (gate.to(tl.float32) * factor.to(tl.float32)).to(dtype)
    place = rows[:, None].to(tl.int64) * N + columns[None, :]
    if HAS_RESIDUAL:
        y = (tl.load(residual_ptr + place, mask=valid, other=0.0).to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(y_ptr + place, y, mask=valid)


def choose_tiling(
    num_columns: int, in_features: int, num_rows: int, is_gated: bool, shared_bytes: int
) -> Tiling:
    """By the shape of W; of the rows only the size of their tile counts. Measured by `benchmarks.gpu_kernels --tune` on
    an H200; devices with less shared memory have fewer loads under way.
    """
    tiling = _measured_tiling(num_columns, in_features, num_rows, is_gated)
    return fitted(tiling, row_tile(num_rows), is_gated, shared_bytes)


def fitted(tiling: Tiling, tile: int, is_gated: bool, shared_bytes: int) -> Tiling:
    """With fewer loads under way where shared memory is small. `tile`: rows of one."""
    stages_that_fit = shared_bytes // stage_bytes(tiling, tile, is_gated)
    return replace(tiling, num_stages=max(min(tiling.num_stages, stages_that_fit), 1))


def stage_bytes(tiling: Tiling, tile: int, is_gated: bool) -> int:
    """Shared memory, in bytes, of one load under way: the tile of rows and the strips of W, in a half type."""
    return (tile + tiling.block_n * (2 if is_gated else 1)) * tiling.block_k * 2


def row_tile(num_rows: int) -> int:
    """Rows of a tile."""
    return min(max(next_power_of_2(num_rows), 16), MAX_ROWS)


def _measured_tiling(num_columns: int, in_features: int, num_rows: int, is_gated: bool) -> Tiling:
    if num_rows > MAX_ROWS:  # bound by multiplying
        return Tiling(64 if is_gated else 128, 64, 3, 2)
    if num_rows > 16:
        return Tiling(32, 64, 4, 2)
    if is_gated:
        if in_features > 4096:
            return Tiling(32, 256, 3, 2)
        return Tiling(32, 128, 3, 2) if in_features >= 2048 else Tiling(32, 128, 4, 4)
    if in_features < 1024:
        return Tiling(16, 128, 6, 2)
    if num_columns <= 8192:
        return Tiling(16, 512, 3, 2)
    return Tiling(32, 256, 3, 2) if num_columns < MANY_COLUMNS else Tiling(64, 128, 4, 2)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationName | None = None,
    factor: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """See the module docstring. Any number of rows. `tiling`: another than the measured ones; where it multiplies by
    another instruction, that may sum in another order, which engine/layers/product_trials.py tries first."""
    num_rows, in_features = x.shape
    is_gated = activation is not None and factor is None
    num_columns = len(weight) // 2 if is_gated else len(weight)
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert residual is None or (residual.is_contiguous() and activation is None)
    assert factor is None or (factor.stride(-1) == 1 and activation is not None)
    block_m = row_tile(num_rows)
    if tiling is None:
        shared_bytes = shared_memory_bytes(x.device)
        tiling = choose_tiling(num_columns, in_features, num_rows, is_gated, shared_bytes)
    if activation is None:
        y = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    else:  # the input of another product
        y = empty_with_spare_rows(num_rows, num_columns, x)
    _skinny_linear_kernel[(-(-num_rows // block_m), -(-num_columns // tiling.block_n))](
        x,
        weight,
        x if bias is None else bias,
        x if factor is None else factor,
        x if residual is None else residual,
        y,
        num_rows,
        0 if factor is None else factor.stride(0),
        N=num_columns,
        K=in_features,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        HAS_BIAS=bias is not None,
        HAS_FACTOR=factor is not None,
        HAS_RESIDUAL=residual is not None,
        IS_GATED=is_gated,
        ACTIVATION=ACTIVATION_CODES[activation],
        num_stages=tiling.num_stages,
        num_warps=tiling.num_warps,
        enable_fp_fusion=False,  # what follows the product is rounded alike in all kernels that do it
        **launch_options(x.device),
    )
    return y
