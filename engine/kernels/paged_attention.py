"""Causal attention over a paged KV cache for a ragged batch: prefill chunks, verifications and decodes in one launch.

For a query row at position p of a request with `seq_len` keys: out = sum_j softmax_j(scale * q . k_j) v_j over
j <= p, j < seq_len, and j > p - window if there is a window. The positions of a request's rows are consecutive; the
last ones may lie behind its keys (speculation beyond a token limit): what they get is never used.

Shapes: query, out [num_tokens, num_heads, head_size]; key_cache, value_cache [num_blocks, block_size, num_kv_heads,
head_size]; block_table [num_reqs, max_blocks] int32; query_start_loc [num_reqs + 1] int32; seq_lens [num_reqs] int32;
positions [num_tokens] int64. Head h reads KV head h // (num_heads // num_kv_heads). Scores, softmax and sums in
float32, weights in the cache's dtype for the second product. Lengths are read on the device, so a captured launch
replays at any length; requests of length 0 and query blocks behind a request's end return at once. Only keys that the
request has written are loaded, whole blocks of the cache behind its window excepted: what a row does not see has weight
zero, and zero times whatever another request left there might be no number.

All sums have one order, so a row's bits depend on nothing but the row: not on the batch, the chunk or the form of the
launch. Keys stand in segments at fixed absolute positions, as many in each as the shape of a head says. A segment is
one tile: its scores s = q . k, their peak m_s = scale * max s, weights w = cast(exp2(fma(s, scale, -m_s))), t_s = sum w
and o_s = w V, the last two by the same matrix instructions, from zero. A row's result is folded from its segments in
order: m' = max(m, m_s); t = fma(t_s, exp2(m_s - m'), t * exp2(m - m')); o likewise; out = o / t.
Segments whose keys a row does not see change nothing (their weights are zero, the factors one), so it does not matter
what else a program computes.

Grid: (query blocks, KV heads, spans of segments). The query rows of one KV head's group stand together: row r of a
block is token r // group, member r % group. A block of BLOCK_Q tokens belongs to one request; request r begins at block
query_start[r] // BLOCK_Q + r. Example, BLOCK_Q 4, query lengths [5, 1, 3]: query_start [0, 5, 6], first blocks
[0, 2, 3]; request 0 has blocks 0 and 1, the grid has 9 // 4 + 3 = 5 blocks. Where all requests fit into one block each,
the blocks are theirs in order.
With one span a program folds all segments in registers. With more (flash decoding, Dao et al. 2023) each stores its
segments to scratch memory; who finishes last of a block's programs folds them, or, if there are many, a second kernel.
How many rows, segments and warps a program has (`Form`) is a question of speed only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_form import (
    MAX_SHORT_QUERY_LEN,
    Form,
    HeadShape,
    choose_form,
    num_segments_of,
    segment_size,
)
from engine.kernels.attention_segments import (
    attend_segment,
    find_request,
    fold,
    fold_segments_kernel,
    load_part,
    whole_segments,
)
from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.spare_rows import empty_with_spare_rows
from engine.kernels.triton_support import jit

MAX_FOLDED_IN_PLACE = 16  # segments; more are folded faster by more programs
MAX_COUNTERS = 1 << 16  # of blocks of queries and KV heads whose segments are folded in place


@jit(do_not_specialize=["num_reqs", "num_slots", "table_stride"])  # one compilation for all batches
def _paged_attention_kernel(
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
    num_slots,  # of scratch memory, one for a segment; a segment's is its number modulo theirs
    scale,
    query_stride_token,
    query_stride_head,
    table_stride,
    key_stride_block,
    key_stride_head,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,  # of keys and values
    BLOCK_Q: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # of a request
    SEGMENT: tl.constexpr,
    SPAN: tl.constexpr,  # segments of a program; 0: all
    SUM_COLUMNS: tl.constexpr,
    FIRST_PHASE: tl.constexpr,  # 2: all segments by masks; 1: chunks are long; 0: and there is a window
    FOLDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last of a prompt see most keys and begin first
    kv_head = tl.program_id(1)
    request = q_block
    if not ONE_BLOCK:
        request = find_request(query_start_ptr, q_block, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    first_query = 0
    if not ONE_BLOCK:
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

    end_query = tl.minimum(first_query + BLOCK_Q, query_len)
    # Blocks before the first key's are not touched: behind a window, they may be another request's by now.
    first_key = 0
    key_end = tl.minimum(computed + end_query, tl.load(seq_lens_ptr + request))
    if WINDOW > 0:
        first_key = tl.maximum(computed + first_query - WINDOW + 1, 0)
    first_segment = first_key // SEGMENT
    if SPAN > 0:
        # Who folds waits for nobody beyond the grid.
        key_end = tl.minimum(key_end, (first_segment // SPAN * SPAN + num_slots) * SEGMENT)
    end_segment = (key_end + SEGMENT - 1) // SEGMENT
    begin_segment, last_segment = first_segment, end_segment
    if SPAN > 0:
        first_span = first_segment // SPAN
        num_programs = (end_segment + SPAN - 1) // SPAN - first_span
        if tl.program_id(2) >= num_programs:
            return
        begin_segment = tl.maximum(first_segment, (first_span + tl.program_id(2)) * SPAN)
        last_segment = tl.minimum(end_segment, (first_span + tl.program_id(2) + 1) * SPAN)

    key_ptr += kv_head * key_stride_head
    value_ptr += kv_head * key_stride_head
    block_table_ptr += request * table_stride
    scale_log2 = scale * 1.4426950408889634  # exp(x) = exp2(x * log2(e))
    peak = tl.full([BLOCK_Q * GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * GROUP_PAD], tl.float32)
    acc = tl.zeros([BLOCK_Q * GROUP_PAD, HEAD_PAD], tl.float32)
    row = row_token * NUM_HEADS + row_head
    slot = row * num_slots
    whole_begin, whole_end = begin_segment, begin_segment
    if FIRST_PHASE < 2:
        whole_begin, whole_end = whole_segments(
            computed + first_query,
            computed + end_query,
            key_end,
            begin_segment,
            last_segment,
            WINDOW,
            SEGMENT,
        )
    for phase in tl.static_range(FIRST_PHASE, 3):
        low = begin_segment if phase == 0 else whole_begin if phase == 1 else whole_end
        high = whole_begin if phase == 0 else whole_end if phase == 1 else last_segment
        for segment in range(low, high):
            part_peak, part_total, part = attend_segment(
                query,
                key_ptr,
                value_ptr,
                block_table_ptr,
                segment,
                row_position,
                first_key,
                key_end,
                scale_log2,
                key_stride_block,
                WINDOW,
                HEAD_SIZE,
                HEAD_PAD,
                BLOCK_SIZE,
                STRIDE_SLOT,
                SEGMENT,
                SUM_COLUMNS,
                phase != 1,
            )
            if SPAN > 0:
                own = slot + segment % num_slots
                tl.store(partial_ptr + own[:, None] * HEAD_SIZE + dims[None, :], part, mask=row_mask)
                tl.store(stats_ptr + own * 2, part_peak, mask=row_valid)
                tl.store(stats_ptr + own * 2 + 1, part_total, mask=row_valid)
            else:
                peak, total, acc = fold(peak, total, acc, part_peak, part_total, part)

    if SPAN > 0:
        if not FOLDS:
            return
        # Who counts last sees what the others stored before they counted.
        tl.debug_barrier()
        counter = counters_ptr + q_block * tl.num_programs(1) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < num_programs - 1:
            return
        tl.store(counter, 0)  # for the next launch
        for segment in tl.range(first_segment, end_segment, loop_unroll_factor=4):  # loads under way at once
            part_peak, part_total, part = load_part(
                partial_ptr, stats_ptr, slot + segment % num_slots, dims, row_valid, HEAD_SIZE
            )
            peak, total, acc = fold(peak, total, acc, part_peak, part_total, part)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out_ptr + row[:, None] * HEAD_SIZE + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=row_mask
    )


def paged_attention(
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
    form: Form | None = None,
    segment: int | None = None,
) -> torch.Tensor:
    """See the module docstring. max_query_len, max_seq_len: host upper bounds. counters: [MAX_COUNTERS] int32, zeros,
    which are zeros again afterwards; without them a second kernel folds. `form`, `segment`: for measuring."""
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    assert key_cache.stride() == value_cache.stride(), "key and value caches must have one layout"
    assert key_cache.stride(0) % key_cache.stride(1) == 0, "blocks must be some slots apart"
    shape = HeadShape(num_heads // num_kv_heads, head_size, key_cache.itemsize)
    group_pad = triton.next_power_of_2(shape.group)
    segment = segment or segment_size(shape, query.device)
    if form is None:
        form = choose_form(
            shape,
            query.device,
            num_reqs=len(seq_lens),
            num_kv_heads=num_kv_heads,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            window=window,
        )
    block_q = max(form.num_rows // group_pad, 1)
    num_segments = num_segments_of(max_seq_len, window, max_query_len, segment)
    span = max(form.span, 1)
    num_spans = (num_segments + 2 * span - 2) // span  # of which the first may lie before the first key
    num_slots = num_spans * span
    out = empty_with_spare_rows(num_tokens, num_heads * head_size, query).view(query.shape)
    partial = stats = out
    if form.span:
        parts = (num_tokens, num_heads, num_slots)
        partial = torch.empty(*parts, head_size, dtype=torch.float32, device=query.device)
        stats = torch.empty(*parts, 2, dtype=torch.float32, device=query.device)
    has_one_block = max_query_len <= block_q
    num_blocks = len(seq_lens) if has_one_block else num_tokens // block_q + len(seq_lens)
    folds = (
        counters is not None
        and num_slots <= MAX_FOLDED_IN_PLACE
        and num_blocks * num_kv_heads <= len(counters)
    )
    num_rows = block_q * group_pad
    constants = {
        "WINDOW": window or 0,
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "HEAD_PAD": max(16, triton.next_power_of_2(head_size)),
        "SEGMENT": segment,
        "enable_fp_fusion": False,  # the forms differ in where a product and a difference meet
        **launch_options(query.device),
    }
    _paged_attention_kernel[(num_blocks, num_kv_heads, num_spans if form.span else 1)](
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
        num_slots,
        scale,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        key_cache.stride(0),
        key_cache.stride(2),
        GROUP=shape.group,
        GROUP_PAD=group_pad,
        BLOCK_SIZE=block_size,
        STRIDE_SLOT=key_cache.stride(1),
        BLOCK_Q=block_q,
        ONE_BLOCK=has_one_block,
        SPAN=form.span,
        # Wider than high, else Triton has every warp of mma.sync compute the whole tile.
        SUM_COLUMNS=2 * num_rows if num_rows < 64 else 16,
        FIRST_PHASE=2 if form.span or max_query_len <= MAX_SHORT_QUERY_LEN else 0 if window else 1,
        FOLDS=folds and form.span > 0,
        num_warps=form.num_warps,
        num_stages=form.num_stages,
        maxnreg=form.max_registers,
        **constants,
    )
    if form.span and not folds:
        fold_segments_kernel[(num_tokens, num_heads)](
            partial,
            stats,
            out,
            positions,
            num_slots,
            num_warps=1,
            **constants,
        )
    return out
