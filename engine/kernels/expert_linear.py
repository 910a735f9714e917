"""Products of few rows with the experts that were chosen for them, and the weighted sum of what comes out.

A row and one of its experts are a pair. Each program streams some rows of that expert's weight and meets them with the
pair's row of x. So no row has to be sorted, only chosen experts are read (twice by neighbouring pairs: from the L2
cache), and a row's result depends neither on the other rows nor on how many there are.

- expert_linear: y[i] = cast(x[i // choices] W[expert_ids[i]]^T).
- weighted_sum: y[i] = cast(weights[i, 0] * x[i, 0] + weights[i, 1] * x[i, 1] + ...), in this order.
Products and sums in float32 (float64 for float64).

Shapes: x [num_rows, in_features]; weight [num_experts, out_features, in_features]; expert_ids [num_rows * choices]
int64; y [num_rows * choices, out_features]. Sum: x [num_rows, choices, size], weights [num_rows, choices] float,
y [num_rows, size]. All dense. Grids: (pairs, column tiles); (rows, column tiles).
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit, tl

BLOCK_N, BLOCK_K = (
    16,
    256,
)  # of an expert's weight, a load: with eight programs on a processor, 64 KiB under way
BLOCK_SUM = 512


def expert_linear_reference(x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    choices = len(expert_ids) // len(x)
    rows = x.repeat_interleave(choices, dim=0)
    return torch.bmm(weight[expert_ids], rows[:, :, None])[:, :, 0]


def weighted_sum_reference(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (x * weights[:, :, None]).sum(dim=1).to(x.dtype)


@jit
def _expert_linear_kernel(
    x_ptr,
    weight_ptr,
    expert_ids_ptr,
    y_ptr,
    CHOICES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUM_TYPE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    pair = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    column_valid = columns < N
    expert = tl.load(expert_ids_ptr + pair).to(tl.int64)
    x_start = x_ptr + (pair // CHOICES).to(tl.int64) * K
    weight_start = weight_ptr + expert * N * K + columns[:, None].to(tl.int64) * K
    acc = tl.zeros([BLOCK_N, BLOCK_K], SUM_TYPE)
    for k in range(0, K, BLOCK_K):
        valid = k + inner < K
        x = tl.load(x_start + k + inner, mask=valid, other=0.0).to(SUM_TYPE)
        weight = tl.load(
            weight_start + (k + inner)[None, :], mask=column_valid[:, None] & valid[None, :], other=0.0
        )
        acc += weight.to(SUM_TYPE) * x[None, :]
    y = tl.sum(acc, axis=1).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + pair.to(tl.int64) * N + columns, y, mask=column_valid)


def expert_linear_triton(x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    num_pairs, (_, num_columns, in_features) = len(expert_ids), weight.shape
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert expert_ids.is_contiguous()
    assert num_pairs % len(x) == 0
    y = torch.empty(num_pairs, num_columns, dtype=x.dtype, device=x.device)
    _expert_linear_kernel[(num_pairs, -(-num_columns // BLOCK_N))](
        x,
        weight,
        expert_ids,
        y,
        CHOICES=num_pairs // len(x),
        N=num_columns,
        K=in_features,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        SUM_TYPE=_sum_type(x),
        num_warps=4,
        **launch_options(x.device),
    )
    return y


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


def weighted_sum_triton(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    num_rows, choices, size = x.shape
    assert x.is_contiguous()
    assert weights.is_contiguous()
    y = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    _weighted_sum_kernel[(num_rows, -(-size // BLOCK_SUM))](
        x,
        weights,
        y,
        CHOICES=choices,
        SIZE=size,
        BLOCK=BLOCK_SUM,
        SUM_TYPE=_sum_type(x),
        num_warps=4,
        **launch_options(x.device),
    )
    return y


def _sum_type(x: torch.Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
