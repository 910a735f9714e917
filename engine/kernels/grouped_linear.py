"""Products of any number of rows with the experts that were chosen for them, and a gated activation in the same launch.

A row and one of its experts are a pair (engine/kernels/group_pairs.py). Pairs of one expert share tiles of 16 to 128
rows, which meet strips of that expert's weight. As in engine/kernels/skinny_linear.py, a pair's products are summed in
the order of K whatever the tile. So its result depends neither on the other pairs nor on their number.

- plain: y[i] = cast(x[i // choices] W[expert_ids[i]]^T).
- gated: W holds gate rows, then up rows; y = cast(cast(activation(cast(gate))) * cast(up)).
Sums in float32 (float64 for float64).

Shapes: x [num_rows, in_features]; weight [num_experts, out_features, in_features]; expert_ids
[num_rows * choices] int64; y [num_rows * choices, out_features], gated: half as many columns. All dense. Grid: (column
tiles, tiles of pairs): neighbouring programs read the same pairs, and the next ones the same weight, from the L2 cache.
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.gated_activation import (
    ACTIVATION_CODES,
    ActivationName,
    activate_times_reference,
    activated,
)
from engine.kernels.group_pairs import SMALLEST_TILE, PairsByExpert
from engine.kernels.skinny_linear import Tiling, fitted
from engine.kernels.triton_support import jit, next_power_of_2, shared_memory_bytes, sum_type, tl

# By the rows of a tile: with gate and up rows, and without (`benchmarks.gpu_kernels --experts --tune` on an H200).
TILINGS = {
    16: (Tiling(32, 256, 3, 2), Tiling(32, 128, 4, 2)),
    32: (Tiling(32, 128, 4, 2), Tiling(64, 64, 4, 2)),
    64: (Tiling(64, 64, 4, 4), Tiling(128, 64, 3, 4)),
    128: (Tiling(128, 64, 4, 8), Tiling(128, 64, 3, 8)),
}
FOR_WIDE_TYPES = Tiling(16, 64, 2, 4)  # float32 and float64, in tiles of 16 rows: for checking, not for speed


def grouped_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_ids: torch.Tensor,
    *,
    activation: ActivationName | None = None,
) -> torch.Tensor:
    rows = x.repeat_interleave(len(expert_ids) // len(x), dim=0)
    y = torch.bmm(weight[expert_ids], rows[:, :, None])[:, :, 0]
    if activation is None:
        return y
    gate, up = y.chunk(2, dim=-1)
    return activate_times_reference(gate, up, activation)


@jit
def _grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    expert_ids_ptr,
    order_ptr,
    ends_ptr,
    y_ptr,
    CHOICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SORTED: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # 0: none, 1: silu, 2: gelu_tanh
    SUM_TYPE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    tile = tl.program_id(1)
    lanes = tl.arange(0, BLOCK_M)
    if IS_SORTED:
        experts = tl.arange(0, EXPERTS_PAD)
        is_expert = experts < NUM_EXPERTS
        ends = tl.load(ends_ptr + experts, mask=is_expert, other=0)
        begins = tl.load(ends_ptr + experts - 1, mask=is_expert & (experts > 0), other=0)
        num_tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
        is_before = is_expert & (tl.cumsum(num_tiles, axis=0) <= tile)  # all tiles of the expert
        expert = tl.sum(is_before.to(tl.int32), axis=0)
        if expert >= NUM_EXPERTS:
            return
        place = tl.max(tl.where(is_before, ends, 0), axis=0)
        place += (tile - tl.sum(tl.where(is_before, num_tiles, 0), axis=0)) * BLOCK_M
        row_valid = place + lanes < tl.sum(tl.where(experts == expert, ends, 0), axis=0)
        pairs = tl.load(order_ptr + place + lanes, mask=row_valid, other=0).to(tl.int64)
    else:
        expert = tl.load(expert_ids_ptr + tile)
        row_valid = lanes == 0
        pairs = (tile + lanes).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    column_valid = columns < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], SUM_TYPE)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], SUM_TYPE)
    x_start = x_ptr + (pairs // CHOICES * K)[:, None]
    expert_start = weight_ptr + expert.to(tl.int64) * (2 * N * K if IS_GATED else N * K)
    weight_start = expert_start + (columns * K)[None, :]
    for k in range(0, K, BLOCK_K):
        ks = k + inner
        x_valid, weight_valid = row_valid[:, None], column_valid[None, :]
        if K % BLOCK_K != 0:
            x_valid, weight_valid = x_valid & (ks < K)[None, :], weight_valid & (ks < K)[:, None]
        x = tl.load(x_start + ks[None, :], mask=x_valid, other=0.0)
        weight = tl.load(weight_start + ks[:, None], mask=weight_valid, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee", out_dtype=SUM_TYPE)
        if IS_GATED:
            up = tl.load(weight_start + N * K + ks[:, None], mask=weight_valid, other=0.0)
            acc_up = tl.dot(x, up, acc_up, input_precision="ieee", out_dtype=SUM_TYPE)
    dtype = y_ptr.dtype.element_ty
    y = acc.to(dtype)
    if IS_GATED:
        gate = activated(y.to(SUM_TYPE), ACTIVATION == 1).to(dtype)
        y = (gate.to(SUM_TYPE) * acc_up.to(dtype).to(SUM_TYPE)).to(dtype)
    tl.store(
        y_ptr + (pairs * N)[:, None] + columns[None, :], y, mask=row_valid[:, None] & column_valid[None, :]
    )


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    pairs: PairsByExpert,
    *,
    activation: ActivationName | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """See the module docstring; `pairs` holds the expert_ids. `tiling`: for measuring."""
    num_pairs, (num_experts, num_columns, in_features) = len(pairs.expert_ids), weight.shape
    is_gated = activation is not None
    if is_gated:
        num_columns //= 2
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert num_pairs % len(x) == 0
    is_sorted, is_half = pairs.order is not None, x.itemsize == 2
    block_m = pairs.tile if is_half else SMALLEST_TILE
    num_tiles = min(num_pairs // block_m + num_experts, num_pairs) if is_sorted else num_pairs
    if tiling is None:
        tiling = FOR_WIDE_TYPES
        if is_half:
            measured = TILINGS[block_m][0 if is_gated else 1]
            tiling = fitted(measured, block_m, is_gated, shared_memory_bytes(x.device))
    y = torch.empty(num_pairs, num_columns, dtype=x.dtype, device=x.device)
    _grouped_linear_kernel[(-(-num_columns // tiling.block_n), num_tiles)](
        x,
        weight,
        pairs.expert_ids,
        pairs.order,
        pairs.ends,
        y,
        CHOICES=num_pairs // len(x),
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=next_power_of_2(num_experts),
        N=num_columns,
        K=in_features,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        IS_SORTED=is_sorted,
        IS_GATED=is_gated,
        ACTIVATION=ACTIVATION_CODES[activation],
        SUM_TYPE=sum_type(x.dtype),
        num_stages=tiling.num_stages,
        num_warps=tiling.num_warps,
        enable_fp_fusion=False,  # as skinny_linear
        **launch_options(x.device),
    )
    return y
