"""What the attention kernels share: which request a program belongs to, and the merging of a context's segments (in
exact numerics, whose parts are folded bit for bit alike wherever it happens: `fold`).

Query blocks: a block of BLOCK_Q tokens belongs to one request; request r begins at block query_start[r] // BLOCK_Q + r.
Segments (flash decoding, Dao et al. 2023): programs leave, by (token, head, segment), the weighted sum of values
partial [.., head_size] and stats [.., 2], the largest score and the sum of weights, all float32. Merging them in order
makes a row's result independent of its neighbours and of the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.dependent_launch import begin


@triton.jit
def find_request(query_start_ptr, q_block, num_reqs, BLOCK_Q: tl.constexpr):
    """The last request whose first query block is <= q_block, by binary search."""
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(query_start_ptr + middle) // BLOCK_Q + middle
        if first <= q_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def merge_segments_kernel(
    partial_ptr,
    stats_ptr,
    out_ptr,
    positions_ptr,
    out_stride_token,
    out_stride_head,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SEGMENT_SIZE: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program a (token, head). Reads exactly the segments that hold a key the row sees."""
    begin(OVERLAPS)
    token = tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    first = 0
    if WINDOW > 0:
        first = (tl.maximum(position - WINDOW + 1, 0) // SEGMENT_SIZE).to(tl.int32)
    last = tl.minimum(position // SEGMENT_SIZE, NUM_SEGMENTS - 1).to(tl.int32)
    dims = tl.arange(0, HEAD_PAD)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_PAD], tl.float32)
    for segment in range(first, last + 1):
        slot = (token * NUM_HEADS + head) * NUM_SEGMENTS + segment
        other_peak = tl.load(stats_ptr + slot * 2)
        other_total = tl.load(stats_ptr + slot * 2 + 1)
        part = tl.load(partial_ptr + slot * HEAD_SIZE + dims, mask=dims < HEAD_SIZE, other=0.0)
        new_peak = tl.maximum(peak, other_peak)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - shift)
        other_decay = tl.exp2(other_peak - shift)
        acc = acc * decay + part * other_decay
        total = total * decay + other_total * other_decay
        peak = new_peak
    result = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(
        out_ptr + token * out_stride_token + head * out_stride_head + dims,
        result.to(out_ptr.dtype.element_ty),
        mask=dims < HEAD_SIZE,
    )


@triton.jit
def fold(peak, total, acc, part_peak, part_total, part):
    """The state of rows after one more segment. peak, total: [rows]; acc: [rows, HEAD_PAD]; float32."""
    new_peak = tl.maximum(peak, part_peak)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp2(peak - shift)
    part_decay = tl.exp2(part_peak - shift)
    # Written out: compilers may choose which of two products a sum swallows.
    total = tl.fma(part_total, part_decay, total * decay)
    acc = tl.fma(part, tl.broadcast_to(part_decay[:, None], part.shape), acc * decay[:, None])
    return new_peak, total, acc


@triton.jit
def fold_segments_kernel(
    partial_ptr,
    stats_ptr,
    out_ptr,
    positions_ptr,
    out_stride_token,
    out_stride_head,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program a (token, head). Reads exactly the segments that hold a key the row sees."""
    begin(OVERLAPS)
    token = tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    first = 0
    if WINDOW > 0:
        first = (tl.maximum(position - WINDOW + 1, 0) // SEGMENT).to(tl.int32)
    last = tl.minimum(position // SEGMENT, NUM_SEGMENTS - 1).to(tl.int32)
    row = tl.zeros([1], tl.int32)
    dims = tl.arange(0, HEAD_PAD)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, HEAD_PAD], tl.float32)
    for segment in range(first, last + 1):
        slot = (token * NUM_HEADS + head) * NUM_SEGMENTS + segment + row
        part_peak = tl.load(stats_ptr + slot * 2)
        part_total = tl.load(stats_ptr + slot * 2 + 1)
        places = partial_ptr + slot[:, None] * HEAD_SIZE + dims[None, :]
        part = tl.load(places, mask=(dims < HEAD_SIZE)[None, :], other=0.0)
        peak, total, acc = fold(peak, total, acc, part_peak, part_total, part)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out_ptr + token * out_stride_token + head * out_stride_head + row[:, None] + dims[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=(dims < HEAD_SIZE)[None, :],
    )
