"""Paged attention whose results depend on nothing but the row: not on the batch, the chunk or the form of the launch.

The contract of engine/kernels/paged_attention.py, with one order of all sums. Keys stand in segments at fixed absolute
positions, as many in each as the shape of a head says. A segment is one tile: its scores, their peak m_s, weights
w = cast(exp2(score - m_s)), t_s = sum w and o_s = w V, the last two by the same matrix instructions, from zero. A row's
result is folded from its segments in order:
m' = max(m, m_s); t = fma(t_s, exp2(m_s - m'), t * exp2(m - m')); o likewise; out = o / t.
Segments whose keys a row does not see change nothing (their weights are zero, the factors one), so it does not matter
what else a program computes.

Grid: (query blocks, KV heads, 1): a program folds all segments in registers; or (.., .., segments): one segment a
program, stored to scratch memory and folded by the program of a block that finishes last, or, if there are many, by a
second kernel. Which of them is a question of speed only.

All forms multiply by mma.sync m16n8k16 (tiles of 16 and 32 rows), in the order of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_segments import find_request, fold, fold_segments_kernel
from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import shared_memory_bytes

ENOUGH_PROGRAMS = 256  # requests times KV heads that occupy a device without splitting contexts
MAX_WHOLE_CONTEXT = (
    2048  # keys; longer contexts are split anyway: lengths differ, and the longest would be waited for
)
MAX_FOLDED_IN_PLACE = 16  # segments; more are folded faster by more programs
MAX_SHORT_QUERY_LEN = 16  # query tokens of a request; longer chunks have parallelism enough
SHORT_ROWS, LONG_ROWS = 16, 32  # of a tile of queries


@triton.jit
def _exact_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    counters_ptr,
    query_start_ptr,
    seq_lens_ptr,
    positions_ptr,
    block_table_ptr,
    num_reqs,
    scale,
    query_stride_token,
    query_stride_head,
    out_stride_token,
    out_stride_head,
    table_stride,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SEGMENT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,  # of the grid; 1: a program folds all
    SUM_COLUMNS: tl.constexpr,
    FOLDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = find_request(query_start_ptr, q_block, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    first_query = (q_block - (query_start // BLOCK_Q + request)) * BLOCK_Q
    if first_query >= query_len:
        return
    computed = tl.load(positions_ptr + query_start).to(tl.int32)  # position of the request's first row

    rows = tl.arange(0, BLOCK_Q * GROUP_PAD)
    row_query = first_query + rows // GROUP_PAD
    row_member = rows % GROUP_PAD
    row_valid = (row_query < query_len) & (row_member < GROUP)
    row_head = kv_head * GROUP + row_member
    row_token = query_start + row_query
    row_position = computed + row_query
    dims = tl.arange(0, HEAD_PAD)
    row_mask = row_valid[:, None] & (dims < HEAD_SIZE)[None, :]
    query = tl.load(
        query_ptr
        + row_token[:, None] * query_stride_token
        + row_head[:, None] * query_stride_head
        + dims[None, :],
        mask=row_mask,
        other=0.0,
    )

    first_key = (
        0  # keys before are not touched: behind a window, their blocks may be another request's by now
    )
    key_end = computed + tl.minimum(first_query + BLOCK_Q, query_len)
    key_end = tl.minimum(key_end, tl.load(seq_lens_ptr + request))
    if WINDOW > 0:
        first_key = tl.maximum(computed + first_query - WINDOW + 1, 0)
    if NUM_SEGMENTS > 1:
        key_end = tl.minimum(key_end, NUM_SEGMENTS * SEGMENT)  # who folds waits for nobody beyond the grid
    first_segment = first_key // SEGMENT
    end_segment = (key_end + SEGMENT - 1) // SEGMENT
    num_parts = end_segment - first_segment
    if NUM_SEGMENTS > 1:
        if (tl.program_id(2) < first_segment) | (tl.program_id(2) >= end_segment):
            return
        first_segment = tl.program_id(2)
        end_segment = first_segment + 1

    peak = tl.full([BLOCK_Q * GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * GROUP_PAD], tl.float32)
    acc = tl.zeros([BLOCK_Q * GROUP_PAD, HEAD_PAD], tl.float32)
    scale_log2 = scale * 1.4426950408889634  # exp(x) = exp2(x * log2(e))
    for segment in range(first_segment, end_segment):
        keys = segment * SEGMENT + tl.arange(0, SEGMENT)
        key_valid = (keys >= first_key) & (keys < key_end)
        blocks = tl.load(
            block_table_ptr + request * table_stride + keys // BLOCK_SIZE, mask=key_valid, other=0
        ).to(tl.int64)
        offsets = (
            blocks * key_stride_block + (keys % BLOCK_SIZE) * key_stride_slot + kv_head * key_stride_head
        )
        key = tl.load(
            key_ptr + offsets[None, :] + dims[:, None],
            mask=(dims < HEAD_SIZE)[:, None] & key_valid[None, :],
            other=0.0,
        )
        value = tl.load(
            value_ptr + offsets[:, None] + dims[None, :],
            mask=key_valid[:, None] & (dims < HEAD_SIZE)[None, :],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2
        seen = (keys[None, :] <= row_position[:, None]) & key_valid[None, :]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > row_position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        part_peak = tl.max(scores, axis=1)
        shift = tl.where(part_peak == float("-inf"), 0.0, part_peak)
        weights = tl.exp2(scores - shift[:, None]).to(value.dtype)
        part = tl.dot(weights, value, input_precision="ieee")
        # A sum over lanes and warps would have the order of the layout; every column of this product is the sum.
        ones = tl.full([SEGMENT, SUM_COLUMNS], 1.0, value.dtype)
        part_total = tl.max(tl.dot(weights, ones, input_precision="ieee"), axis=1)
        peak, total, acc = fold(peak, total, acc, part_peak, part_total, part)

    if NUM_SEGMENTS > 1:
        slot = (row_token * NUM_HEADS + row_head) * NUM_SEGMENTS
        own = slot + tl.program_id(2)
        tl.store(partial_ptr + own[:, None] * HEAD_SIZE + dims[None, :], acc, mask=row_mask)
        tl.store(stats_ptr + own * 2, peak, mask=row_valid)
        tl.store(stats_ptr + own * 2 + 1, total, mask=row_valid)
        if not FOLDS:
            return
        # Who counts last sees what the others stored before they counted.
        tl.debug_barrier()
        counter = counters_ptr + q_block * tl.num_programs(1) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < num_parts - 1:
            return
        tl.store(counter, 0)  # for the next launch
        first_segment = first_key // SEGMENT
        peak = tl.full([BLOCK_Q * GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q * GROUP_PAD], tl.float32)
        acc = tl.zeros([BLOCK_Q * GROUP_PAD, HEAD_PAD], tl.float32)
        for segment in range(first_segment, first_segment + num_parts):
            own = slot + segment
            part_peak = tl.load(stats_ptr + own * 2, mask=row_valid, other=0.0, cache_modifier=".cg")
            part_total = tl.load(stats_ptr + own * 2 + 1, mask=row_valid, other=0.0, cache_modifier=".cg")
            part = tl.load(
                partial_ptr + own[:, None] * HEAD_SIZE + dims[None, :],
                mask=row_mask,
                other=0.0,
                cache_modifier=".cg",
            )
            peak, total, acc = fold(peak, total, acc, part_peak, part_total, part)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out_ptr + row_token[:, None] * out_stride_token + row_head[:, None] * out_stride_head + dims[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=row_mask,
    )


def segment_size(head_size: int, item_bytes: int) -> int:
    """Keys of a segment. It decides how results are rounded, so it knows nothing but the shape of a head."""
    row_bytes = max(16, triton.next_power_of_2(head_size)) * item_bytes
    return 128 if row_bytes <= 128 else 64 if row_bytes <= 512 else 32


def _num_stages(tile_bytes: int, num_segments: int, device: torch.device) -> int:
    """A program of several segments loads the next one's keys and values while it multiplies."""
    return 3 if num_segments == 1 and 5 * tile_bytes <= shared_memory_bytes(device) else 2


def exact_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
    counters: torch.Tensor | None = None,
    splits: bool | None = None,
    num_rows: int | None = None,
) -> torch.Tensor:
    """As `paged_attention`, whose reference is the oracle. `splits`, `num_rows` (of a tile): for measuring."""
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    assert key_cache.stride() == value_cache.stride(), "key and value caches must have one layout"
    group = num_heads // num_kv_heads
    group_pad = triton.next_power_of_2(group)
    head_pad = max(16, triton.next_power_of_2(head_size))
    segment = segment_size(head_size, key_cache.itemsize)
    is_short = max_query_len <= MAX_SHORT_QUERY_LEN
    if splits is None:
        is_busy = len(seq_lens) * num_kv_heads >= ENOUGH_PROGRAMS and max_seq_len <= MAX_WHOLE_CONTEXT
        splits = is_short and not is_busy
    num_segments = -(-max_seq_len // segment) if splits else 1
    if num_rows is None:
        num_rows = SHORT_ROWS if is_short else LONG_ROWS if head_pad <= 256 else min(LONG_ROWS, 32)
    block_q = max(num_rows // group_pad, 1)
    out = torch.empty_like(query)
    partial = stats = out
    if num_segments > 1:
        shape = (num_tokens, num_heads, num_segments)
        partial = torch.empty(*shape, head_size, dtype=torch.float32, device=query.device)
        stats = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
    constants = {
        "WINDOW": window or 0,
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "HEAD_PAD": head_pad,
        "SEGMENT": segment,
        "NUM_SEGMENTS": num_segments,
        **launch_options(query.device),
    }
    grid = (num_tokens // block_q + len(seq_lens), num_kv_heads, num_segments)
    folds = (
        counters is not None
        and num_segments <= MAX_FOLDED_IN_PLACE
        and grid[0] * num_kv_heads <= len(counters)
    )
    _exact_attention_kernel[grid](
        query,
        key_cache,
        value_cache,
        out,
        partial,
        stats,
        out if counters is None else counters,
        query_start_loc,
        seq_lens,
        positions,
        block_table,
        len(seq_lens),
        scale,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        GROUP=group,
        GROUP_PAD=group_pad,
        BLOCK_SIZE=block_size,
        BLOCK_Q=block_q,
        # Wider than high, else Triton has every warp of mma.sync compute the whole tile.
        SUM_COLUMNS=2 * num_rows if num_rows < 64 else 16,
        FOLDS=folds,
        num_warps=8 if head_pad > 256 or num_rows * head_pad > 64 * 128 else 4,
        num_stages=_num_stages(segment * head_pad * key_cache.itemsize, num_segments, query.device),
        **constants,
    )
    if num_segments > 1 and not folds:
        fold_segments_kernel[(num_tokens, num_heads)](
            partial, stats, out, positions, out.stride(0), out.stride(1), num_warps=1, **constants
        )
    return out
