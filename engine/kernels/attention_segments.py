"""What the attention kernels share: which request a program belongs to, and the folding of a context's segments, which
rounds alike wherever it happens (`fold`).

Query blocks: a block of BLOCK_Q tokens belongs to one request; request r begins at block query_start[r] // BLOCK_Q + r.
Segments (flash decoding, Dao et al. 2023): programs leave, by (token, head, slot), the weighted sum of values
partial [.., head_size] and stats [.., 2], the largest score and the sum of weights, all float32. Folding them in order
makes a row's result independent of its neighbours and of the batch.
"""

from __future__ import annotations

import triton.language as tl

from engine.kernels.dependent_launch import begin
from engine.kernels.triton_support import jit

MAX_BLOCKS_OF_SEGMENT = tl.constexpr(8)  # of the cache; more of them are looked up key by key


@jit
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


@jit
def whole_segments(
    position, end_position, key_end, begin_segment, end_segment, WINDOW: tl.constexpr, SEGMENT: tl.constexpr
):
    """The first of the segments that rows at [position, end_position) all see whole, and the one behind the last: most
    are of a long chunk, and they stand between some that need masks."""
    begin = begin_segment
    if WINDOW > 0:
        outside = tl.maximum(end_position - WINDOW, 0)  # keys that the last row does not see
        begin = tl.minimum(tl.maximum((outside + SEGMENT - 1) // SEGMENT, begin), end_segment)
    end = tl.minimum(tl.minimum(position + 1, key_end) // SEGMENT, end_segment)
    return begin, tl.maximum(end, begin)


@jit
def find_keys(
    table_ptr,
    segment,
    first_key,
    key_end,
    stride_block,
    BLOCK_SIZE: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    SEGMENT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Where keys and values of a segment begin, [SEGMENT] int64, in elements. Keys behind key_end, and in blocks before
    first_key's, get the place of another one of the request: what is loaded is initialized, and no load needs a mask.
    """
    num_blocks: tl.constexpr = SEGMENT // BLOCK_SIZE
    places = tl.arange(0, SEGMENT)
    numbers = segment * SEGMENT + places
    if SEGMENT % BLOCK_SIZE == 0 and num_blocks <= MAX_BLOCKS_OF_SEGMENT:
        # Block by block: one load and one product for all keys of a block, not for each.
        offsets, ends = tl.zeros([SEGMENT], tl.int64), tl.zeros([SEGMENT], tl.int32)
        first_block, last_block = first_key // BLOCK_SIZE, (key_end - 1) // BLOCK_SIZE
        for index in tl.static_range(num_blocks):
            block = segment * num_blocks + index
            end = key_end
            if not WHOLE:
                end = tl.where(block < first_block, 0, key_end)
                block = tl.minimum(tl.maximum(block, first_block), last_block)
            offset = tl.load(table_ptr + block).to(tl.int64) * stride_block
            offsets = tl.where(places // BLOCK_SIZE == index, offset, offsets)
            ends = tl.where(places // BLOCK_SIZE == index, end, ends)
        slots = places % BLOCK_SIZE
        if not WHOLE:
            slots = tl.where(numbers < ends, slots, 0)
    else:
        numbers = tl.minimum(tl.maximum(numbers, first_key), key_end - 1)
        offsets = tl.load(table_ptr + numbers // BLOCK_SIZE).to(tl.int64) * stride_block
        slots = numbers % BLOCK_SIZE
    offsets += slots * STRIDE_SLOT
    if STRIDE_SLOT % 16 == 0:  # and so is a block's; triton 3.8 does not see it through a choice
        offsets = tl.multiple_of(offsets, 16)
    return offsets


@jit
def attend_segment(
    query,
    key_ptr,
    value_ptr,
    table_ptr,
    segment,
    row_position,
    first_key,
    key_end,
    scale_log2,
    stride_block,
    WINDOW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    SEGMENT: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,  # else every row sees every key
):
    """(peak, sum of weights, weighted sum of values) of one segment. query: [rows, HEAD_PAD]."""
    dims = tl.arange(0, HEAD_PAD)
    offsets = find_keys(
        table_ptr, segment, first_key, key_end, stride_block, BLOCK_SIZE, STRIDE_SLOT, SEGMENT, not MASKED
    )
    if HEAD_SIZE == HEAD_PAD:
        key = tl.load(key_ptr + offsets[:, None] + dims[None, :])
        value = tl.load(value_ptr + offsets[:, None] + dims[None, :])
    else:
        mask = (dims < HEAD_SIZE)[None, :]
        key = tl.load(key_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        value = tl.load(value_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if MASKED:
        keys = segment * SEGMENT + tl.arange(0, SEGMENT)
        seen = keys[None, :] < tl.minimum(row_position + 1, key_end)[:, None]
        if WINDOW > 0:  # which begins with first_key or behind it
            seen = seen & (keys[None, :] > (row_position - WINDOW)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    peak = tl.max(scores, axis=1) * scale_log2
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    # Written out, as compilers would fuse the product and the difference only where no mask stands between.
    scores = tl.fma(
        scores, tl.full(scores.shape, scale_log2, tl.float32), tl.broadcast_to(-shift[:, None], scores.shape)
    )
    weights = tl.exp2(scores).to(value.dtype)
    # A sum over lanes and warps would have the order of the layout; every column of this product is the sum.
    ones = tl.full([SEGMENT, SUM_COLUMNS], 1.0, value.dtype)
    total = tl.max(tl.dot(weights, ones, input_precision="ieee"), axis=1)
    return peak, total, tl.dot(weights, value, input_precision="ieee")


@jit
def fold(peak, total, acc, part_peak, part_total, part):
    """The state of rows after one more segment. peak, total: [rows]; acc: [rows, HEAD_PAD]; float32."""
    new_peak = tl.maximum(peak, part_peak)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp2(peak - shift)
    part_decay = tl.exp2(part_peak - shift)
    # Written out, and compiled without fused products: compilers choose which of two products a sum swallows, and in
    # some forms of the kernel the peaks are products too.
    total = tl.fma(part_total, part_decay, total * decay)
    acc = tl.fma(part, tl.broadcast_to(part_decay[:, None], part.shape), acc * decay[:, None])
    return new_peak, total, acc


@jit
def load_part(partial_ptr, stats_ptr, slots, dims, valid, HEAD_SIZE: tl.constexpr):
    """(peak, sum of weights, weighted sum of values) of one segment, from scratch memory. slots, valid: [rows]."""
    peak = tl.load(
        stats_ptr + slots * 2, mask=valid, other=0.0, cache_modifier=".cg"
    )  # others may have stored it
    total = tl.load(stats_ptr + slots * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
    places = partial_ptr + slots[:, None] * HEAD_SIZE + dims[None, :]
    mask = valid[:, None] & (dims < HEAD_SIZE)[None, :]
    return peak, total, tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")


@jit(do_not_specialize=["num_slots"])
def fold_segments_kernel(
    partial_ptr,
    stats_ptr,
    out_ptr,
    positions_ptr,
    num_slots,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SEGMENT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program a (token, head). Reads exactly the segments that hold a key the row sees."""
    begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    first = 0
    if WINDOW > 0:
        first = (tl.maximum(position - WINDOW + 1, 0) // SEGMENT).to(tl.int32)
    last = tl.minimum(position // SEGMENT, first + num_slots - 1).to(tl.int32)
    out_row = token * NUM_HEADS + head
    row = tl.zeros([1], tl.int32)
    dims = tl.arange(0, HEAD_PAD)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, HEAD_PAD], tl.float32)
    for segment in tl.range(first, last + 1, loop_unroll_factor=4):  # loads under way at once
        slot = out_row * num_slots + segment % num_slots + row
        part_peak, part_total, part = load_part(partial_ptr, stats_ptr, slot, dims, row == 0, HEAD_SIZE)
        peak, total, acc = fold(peak, total, acc, part_peak, part_total, part)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out_ptr + out_row * HEAD_SIZE + row[:, None] + dims[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=(dims < HEAD_SIZE)[None, :],
    )
