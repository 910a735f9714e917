"""y = x W^T or norm(x) W^T for one row and a small W: each program has its strip of W before the row is there.

A step of one request of a small model is a chain of short products, in which waiting costs more than reading. A program
here reads its whole strip of W, into shared memory, while the kernel before still runs (dependent_launch.py); then the
row at once. There is no loop. The norm is made on the way: every program repeats it, which costs less than a launch for
itself, with one row.

Sums and roundings are those of rms_norm.py and skinny_linear.py, and the row's bits are the same as by these one after
the other.

- plain: y = cast(norm(x) W^T) (+ bias before the cast).
- gated: W holds gate rows, then up rows; y = cast(cast(activation(cast(gate))) * cast(up)).
- residual: y = residual + cast(norm(x) W^T).

Shapes: x [1, in_features] dense; weight [out_features, in_features] dense; bias [out_features]; norm weight
[in_features]; residual, y [1, out_features], gated: y [1, out_features / 2]. Half types. Grid: one program a strip of
BLOCK_N columns of y.
"""

# mypy: disable-error-code="assignment, var-annotated"
# Kernels grow tuples of tiles.

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import (
    can_overlap,
    launch_options,
    let_next_begin,
    prefetch_rows,
    wait_for_previous,
)
from engine.kernels.gated_activation import ACTIVATION_CODES, ActivationName, activated
from engine.kernels.rms_norm import NormForm, rms_norm_reference
from engine.kernels.row_norm import MAX_PAIRED_SIZE, PIECE_SIZE, inverse_rms, sum_of_pieces, weighted
from engine.kernels.skinny_linear import skinny_linear_reference
from engine.kernels.triton_support import jit, next_power_of_2, tl

MAX_WEIGHT_BYTES = 8 << 20  # of a larger one, too few programs hold their strip at once
MAX_RESIDENT_BYTES = 72 << 10  # of a program's strip, so that two or three of them fit on a multiprocessor
MAX_NORMED_FEATURES = MAX_PAIRED_SIZE  # of a row that is normed on the way
BLOCK_N = 16
_TILE_ROWS = None if tl is None else tl.constexpr(16)  # the least that the matrix units multiply


def resident_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, NormForm] | None = None,
    activation: ActivationName | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    if norm is not None:
        x = rms_norm_reference(x, *norm)
    return skinny_linear_reference(x, weight, bias, activation=activation, residual=residual)


@jit
def _pinned(x, OVERLAPS: tl.constexpr):
    """x, made in this place: the compiler would rather make it anew in each warp, or read it just before its use."""
    if OVERLAPS:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@jit
def _resident_linear_kernel(
    x_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    eps,
    offset,
    N: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # of a piece of K
    LAST_WIDTH: tl.constexpr,  # of the last one, padded
    PIECES: tl.constexpr,
    PREFETCH: tl.constexpr,  # elements of each row of W that are asked for at once
    BLOCK_N: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,  # 0: none; else gated, 1: silu, 2: gelu_tanh
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_valid = columns < N
    first_rows = tl.minimum(columns, N - 1) * K
    prefetch_rows(weight_ptr + first_rows, PREFETCH, OVERLAPS)
    if ACTIVATION > 0:
        prefetch_rows(weight_ptr + N * K + first_rows, PREFETCH, OVERLAPS)
    strips, up_strips, norm_weights = (), (), ()
    for piece in tl.static_range(PIECES):
        inner = piece * WIDTH + tl.arange(0, WIDTH if piece + 1 < PIECES else LAST_WIDTH)
        mask = column_valid[None, :] if piece + 1 < PIECES else column_valid[None, :] & (inner < K)[:, None]
        place = columns[None, :] * K + inner[:, None]
        strips += (tl.load(weight_ptr + place, mask=mask, other=0.0),)
        if ACTIVATION > 0:
            up_strips += (tl.load(weight_ptr + N * K + place, mask=mask, other=0.0),)
        if HAS_NORM:
            norm_weights += (tl.load(norm_weight_ptr + inner, mask=inner < K, other=0.0),)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=column_valid, other=0.0).to(tl.float32)
        if ACTIVATION > 0:
            up_bias = tl.load(bias_ptr + N + columns, mask=column_valid, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    dtype = y_ptr.dtype.element_ty
    xs = ()
    for piece in tl.static_range(PIECES):
        inner = piece * WIDTH + tl.arange(0, WIDTH if piece + 1 < PIECES else LAST_WIDTH)
        xs += (tl.load(x_ptr + inner[None, :], mask=(inner < K)[None, :], other=0.0),)
    valid = (tl.arange(0, _TILE_ROWS) == 0)[:, None] & column_valid[None, :]  # all rows of a tile are the one
    results = tl.broadcast_to(columns[None, :], [_TILE_ROWS, BLOCK_N])
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + results, mask=valid, other=0.0)
    if HAS_NORM:
        scale = inverse_rms(sum_of_pieces(xs, PIECES), eps, K)
    acc = tl.zeros([_TILE_ROWS, BLOCK_N], tl.float32)
    acc_up = tl.zeros([_TILE_ROWS, BLOCK_N], tl.float32)
    for piece in tl.static_range(PIECES):
        x = xs[piece]
        if HAS_NORM:
            normalised = x.to(tl.float32) * scale[:, None]
            norm_weight = norm_weights[piece][None, :].to(tl.float32)
            x = weighted(normalised, norm_weight, offset, ROUNDS_FIRST, dtype).to(dtype)
        x = _pinned(x, OVERLAPS)
        x = tl.broadcast_to(x, [_TILE_ROWS, x.shape[1]])
        acc = tl.dot(x, strips[piece], acc, input_precision="ieee")
        if ACTIVATION > 0:
            acc_up = tl.dot(x, up_strips[piece], acc_up, input_precision="ieee")
    if HAS_BIAS:
        acc += bias[None, :]
    y = acc.to(dtype)
    if ACTIVATION > 0:
        if HAS_BIAS:
            acc_up += up_bias[None, :]
        gate = activated(y.to(tl.float32), ACTIVATION == 1).to(dtype)
        y = (gate.to(tl.float32) * acc_up.to(dtype).to(tl.float32)).to(dtype)
    if HAS_RESIDUAL:
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(y_ptr + results, y, mask=valid)


def suits_resident(x: torch.Tensor, weight: torch.Tensor, *, is_gated: bool) -> bool:
    """Is this kernel the best one for the product of x [num_rows, in_features], of a half type, with the weight? It is
    nothing without what it reads early."""
    num_rows, in_features = x.shape
    strip_bytes = BLOCK_N * (2 if is_gated else 1) * in_features * weight.element_size()
    return (
        num_rows == 1
        and strip_bytes <= MAX_RESIDENT_BYTES
        and weight.nbytes <= MAX_WEIGHT_BYTES
        and can_overlap(x.device)
    )


def resident_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, NormForm] | None = None,
    activation: ActivationName | None = None,
    residual: torch.Tensor | None = None,
    block_n: int = BLOCK_N,
    num_warps: int | None = None,
) -> torch.Tensor:
    """See the module docstring. `block_n`, `num_warps`: for measuring; results do not depend on them."""
    num_rows, in_features = x.shape
    assert num_rows == 1, f"got {num_rows} rows, expected one"
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert norm is None or in_features <= MAX_NORMED_FEATURES
    assert residual is None or (residual.is_contiguous() and activation is None)
    num_columns = len(weight) // (1 if activation is None else 2)
    last_start = (in_features - 1) // PIECE_SIZE * PIECE_SIZE
    norm_weight, form = (weight, NormForm(0.0)) if norm is None else norm
    if num_warps is None:  # measured
        num_warps = 1 if in_features <= MAX_NORMED_FEATURES else 2
    y = torch.empty(1, num_columns, dtype=x.dtype, device=x.device)
    _resident_linear_kernel[(-(-num_columns // block_n),)](
        x,
        norm_weight,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        y,
        form.eps,
        form.offset,
        N=num_columns,
        K=in_features,
        WIDTH=PIECE_SIZE,
        LAST_WIDTH=max(next_power_of_2(in_features - last_start), 16),
        PIECES=last_start // PIECE_SIZE + 1,
        PREFETCH=next_power_of_2(in_features + 1) // 2,
        BLOCK_N=block_n,
        HAS_NORM=norm is not None,
        ROUNDS_FIRST=form.rounds_first,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=ACTIVATION_CODES[activation],
        num_warps=num_warps,
        enable_fp_fusion=False,  # what follows the product is rounded alike in all kernels that do it
        **launch_options(x.device),
    )
    return y
