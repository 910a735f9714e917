"""Causal attention over a paged KV cache for a ragged batch: prefill chunks, verifications and decodes in one launch.

For a query row at position p of a request with `seq_len` keys: out = sum_j softmax_j(scale * q . k_j) v_j over
j <= p, j < seq_len, and j > p - window if there is a window. The positions of a request's rows are consecutive; the
last ones may lie behind its keys (speculation beyond a token limit): what they get is never used.

Shapes: query, out [num_tokens, num_heads, head_size]; key_cache, value_cache [num_blocks, block_size, num_kv_heads,
head_size]; block_table [num_reqs, max_blocks] int32; query_start_loc [num_reqs + 1] int32; seq_lens [num_reqs] int32;
positions [num_tokens] int64.
Head h reads KV head h // (num_heads // num_kv_heads). Scores, softmax and sums in float32, weights in the cache's
dtype for the second product. Lengths are read on the device, so a captured launch replays at any length; requests of
length 0 and query blocks behind a request's end return at once. Keys behind a row's position are never read as
values of weight zero: they are not loaded or masked before the maximum is taken.

Grid: (query blocks, KV heads, segments). The query rows of one KV head's group stand together: row r of a block is
token r // group, member r % group. A block of BLOCK_Q tokens belongs to one request; request r begins at block
query_start[r] // BLOCK_Q + r. Example, BLOCK_Q 4, query lengths [5, 1, 3]: query_start [0, 5, 6], first blocks
[0, 2, 3]; request 0 has blocks 0 and 1, the grid has 9 // 4 + 3 = 5 blocks.

Contexts of decodes are split into segments at fixed absolute positions (flash decoding, Dao et al.
2023), merged in order: a row's result does not depend on its neighbours or on the batch. The program that finishes last
of a block's segments merges them, or, if they are many, a second kernel does, one program a token and head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_segments import find_request, merge_segments_kernel
from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import shared_memory_bytes

SEGMENTS = (
    128,
    512,
)  # keys of one program where a context is split: with few requests, and with enough of them
ENOUGH_PROGRAMS = 256  # requests times KV heads that occupy a device without more than the necessary splits
MAX_MERGED_IN_PLACE = 16  # segments; more are merged faster by more programs
MAX_COUNTERS = 1 << 16  # of blocks of queries and KV heads whose segments are merged in place
MAX_SPLIT_QUERY_LEN = 16  # query tokens of a request; longer chunks have parallelism enough


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """By the definition, request by request, in the dtype of the inputs (float64 for an oracle). Syncs."""
    output = torch.zeros_like(query)
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, end = starts[request], starts[request + 1]
        keys = torch.arange(seq_len, device=query.device)
        blocks, offsets = block_table[request].long()[keys // block_size], keys % block_size
        key = key_cache[blocks, offsets].repeat_interleave(group, dim=1)  # [seq_len, num_heads, head_size]
        value = value_cache[blocks, offsets].repeat_interleave(group, dim=1)
        rows = positions[first:end, None]
        seen = keys <= rows
        if window is not None:
            seen &= keys > rows - window
        scores = torch.einsum("qhd,khd->hqk", query[first:end], key) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        output[first:end] = torch.einsum("hqk,khd->qhd", weights, value)
    return output


@triton.jit
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
    TILE: tl.constexpr,
    SEGMENT_SIZE: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    MERGES: tl.constexpr,
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

    key_begin = 0
    key_end = computed + tl.minimum(first_query + BLOCK_Q, query_len)
    key_end = tl.minimum(key_end, tl.load(seq_lens_ptr + request))
    if WINDOW > 0:
        key_begin = tl.maximum(computed + first_query - WINDOW + 1, 0)
    if NUM_SEGMENTS > 1:
        key_end = tl.minimum(
            key_end, NUM_SEGMENTS * SEGMENT_SIZE
        )  # who merges waits for nobody beyond the grid
    first_segment = key_begin // SEGMENT_SIZE
    last_segment = (key_end - 1) // SEGMENT_SIZE
    if NUM_SEGMENTS > 1:
        key_begin = tl.maximum(key_begin, tl.program_id(2) * SEGMENT_SIZE)
        key_end = tl.minimum(key_end, (tl.program_id(2) + 1) * SEGMENT_SIZE)
        if key_begin >= key_end:
            return
    # Tiles begin at multiples of TILE, so that a row's sums are formed alike whatever its neighbours. Keys before
    # `first_key` are not touched: behind a window, their blocks may be another request's by now.
    first_key = key_begin
    key_begin = (key_begin // TILE) * TILE

    peak = tl.full([BLOCK_Q * GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * GROUP_PAD], tl.float32)
    acc = tl.zeros([BLOCK_Q * GROUP_PAD, HEAD_PAD], tl.float32)
    scale_log2 = scale * 1.4426950408889634  # exp(x) = exp2(x * log2(e))
    for tile in range(key_begin, key_end, TILE):
        keys = tile + tl.arange(0, TILE)
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
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = new_peak

    if NUM_SEGMENTS > 1:
        slot = (row_token * NUM_HEADS + row_head) * NUM_SEGMENTS + tl.program_id(2)
        tl.store(partial_ptr + slot[:, None] * HEAD_SIZE + dims[None, :], acc, mask=row_mask)
        tl.store(stats_ptr + slot * 2, peak, mask=row_valid)
        tl.store(stats_ptr + slot * 2 + 1, total, mask=row_valid)
        if not MERGES:
            return
        # Who counts last sees what the others stored before they counted.
        tl.debug_barrier()
        counter = counters_ptr + q_block * tl.num_programs(1) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < last_segment - first_segment:
            return
        tl.store(counter, 0)  # for the next launch
        peak = tl.full([BLOCK_Q * GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q * GROUP_PAD], tl.float32)
        acc = tl.zeros([BLOCK_Q * GROUP_PAD, HEAD_PAD], tl.float32)
        slot = (row_token * NUM_HEADS + row_head) * NUM_SEGMENTS
        for segment in range(first_segment, last_segment + 1):
            own = slot + segment
            other_peak = tl.load(stats_ptr + own * 2, mask=row_valid, other=0.0, cache_modifier=".cg")
            other_total = tl.load(stats_ptr + own * 2 + 1, mask=row_valid, other=0.0, cache_modifier=".cg")
            part = tl.load(
                partial_ptr + own[:, None] * HEAD_SIZE + dims[None, :],
                mask=row_mask,
                other=0.0,
                cache_modifier=".cg",
            )
            new_peak = tl.maximum(peak, other_peak)
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay = tl.exp2(peak - shift)
            other_decay = tl.exp2(other_peak - shift)
            acc = acc * decay[:, None] + part * other_decay[:, None]
            total = total * decay + other_total * other_decay
            peak = new_peak
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out_ptr + row_token[:, None] * out_stride_token + row_head[:, None] * out_stride_head + dims[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=row_mask,
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
    segment: int | None = None,
    tile: int | None = None,
) -> torch.Tensor:
    """See the module docstring. max_query_len, max_seq_len: host upper bounds. counters: [MAX_COUNTERS] int32, zeros,
    which are zeros again afterwards; without them a second kernel merges. `segment`, `tile`: for measuring.
    """
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    assert key_cache.stride() == value_cache.stride(), "key and value caches must have one layout"
    group = num_heads // num_kv_heads
    group_pad = triton.next_power_of_2(group)
    head_pad = max(16, triton.next_power_of_2(head_size))
    is_few = max_query_len <= MAX_SPLIT_QUERY_LEN
    segment = segment or SEGMENTS[len(seq_lens) * num_kv_heads >= ENOUGH_PROGRAMS]
    is_split = is_few and max_seq_len > segment
    num_segments = -(-max_seq_len // segment) if is_split else 1
    is_wide = head_pad > 256  # the sums of 64 rows would not fit into registers
    # Decodes and verifications are computed alike, so that drafts cannot change a token's last bits.
    num_rows = 16 if is_few else 32 if is_wide else 64
    block_q = max(num_rows // group_pad, 1)
    # Two stages of keys and values must fit into shared memory; the one tile of a short segment needs one stage.
    row_bytes = head_pad * key_cache.itemsize
    if tile is None:
        tile = 64 if head_pad < 256 else 32 if row_bytes <= 1024 else 16
        fits = 3 * segment * row_bytes <= shared_memory_bytes(query.device)
        if segment == SEGMENTS[0] and is_split and row_bytes <= 512 and fits:
            tile = segment
    tile = min(tile, segment)
    out = torch.empty_like(query)
    partial = stats = out
    if is_split:
        shape = (num_tokens, num_heads, num_segments)
        partial = torch.empty(*shape, head_size, dtype=torch.float32, device=query.device)
        stats = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
    constants = {
        "WINDOW": window or 0,
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "HEAD_PAD": head_pad,
        "SEGMENT_SIZE": segment,
        "NUM_SEGMENTS": num_segments,
        **launch_options(query.device),
    }
    grid = (num_tokens // block_q + len(seq_lens), num_kv_heads, num_segments)
    merges = (
        counters is not None
        and num_segments <= MAX_MERGED_IN_PLACE
        and grid[0] * num_kv_heads <= len(counters)
    )
    _paged_attention_kernel[grid](
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
        TILE=tile,
        MERGES=merges,
        num_warps=8 if is_wide else 4,
        num_stages=2,
        **constants,
    )
    if is_split and not merges:
        merge_segments_kernel[(num_tokens, num_heads)](
            partial, stats, out, positions, out.stride(0), out.stride(1), num_warps=1, **constants
        )
    return out
