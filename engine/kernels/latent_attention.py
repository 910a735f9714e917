"""Causal attention of many heads over one row a token (MLA, absorbed form; arXiv:2405.04434): what is cached is both.

For a query row at position p of a request with `seq_len` keys: out = sum_j softmax_j(scale * q . k_j) k_j[:value_size]
over j <= p, j < seq_len. As engine/kernels/paged_attention.py, whose conventions hold, with one KV head whose values
are the first features of its keys: each cached row is read once for both products.

Shapes: query [num_tokens, num_heads, row_size]; cache [num_blocks, block_size, 1, row_size]; out [num_tokens,
num_heads, value_size]; block_table [num_reqs, max_blocks] int32; query_start_loc [num_reqs + 1] int32; seq_lens
[num_reqs] int32; positions [num_tokens] int64. Scores, softmax and sums in float32, weights in the cache's dtype for
the second product. Lengths are read on the device, so a captured launch replays at any length.

Grid: (query blocks, parts of the heads, segments). A program has HEADS neighbouring heads of BLOCK_Q neighbouring
tokens of a request; its row r is token r // HEADS, head r % HEADS. Its query stands in two pieces, that which
meets the values' features and the rest (the rotated ones), so that neither is padded to a power of two of the whole.
Contexts beyond SEGMENT keys are split at fixed absolute positions and merged in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_segments import find_request, fold_segments_kernel
from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit

SEGMENT = 256  # keys of one program where a context is split: with one KV head, little else runs in parallel
MAX_SPLIT_QUERY_LEN = 16  # query tokens of a request; longer ones have parallelism enough


def latent_attention_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    *,
    value_size: int,
    scale: float,
) -> torch.Tensor:
    """By the definition, request by request, in the dtype of the inputs (float64 for an oracle). Syncs."""
    output = query.new_zeros(*query.shape[:2], value_size)
    block_size = cache.shape[1]
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, end = starts[request], starts[request + 1]
        keys = torch.arange(seq_len, device=query.device)
        rows = cache[block_table[request].long()[keys // block_size], keys % block_size, 0]
        scores = torch.einsum("qhd,kd->hqk", query[first:end], rows) * scale
        weights = scores.masked_fill(keys > positions[first:end, None], float("-inf")).softmax(dim=-1)
        output[first:end] = torch.einsum("hqk,kd->qhd", weights, rows[:, :value_size])
    return output


@jit(do_not_specialize=["num_reqs", "num_segments", "table_stride"])  # one compilation for all batches
def _latent_attention_kernel(
    query_ptr,
    cache_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    query_start_ptr,
    seq_lens_ptr,
    positions_ptr,
    block_table_ptr,
    num_reqs,
    num_segments,
    scale,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT_SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    q_block = tl.program_id(0)
    request = find_request(query_start_ptr, q_block, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    first_query = (q_block - (query_start // BLOCK_Q + request)) * BLOCK_Q
    if first_query >= query_len:
        return
    computed = tl.load(positions_ptr + query_start).to(tl.int32)

    rows = tl.arange(0, BLOCK_Q * HEADS)
    row_query = first_query + rows // HEADS
    row_head = tl.program_id(1) * HEADS + rows % HEADS
    row_valid = (row_query < query_len) & (row_head < NUM_HEADS)
    row_token = query_start + row_query
    row_position = computed + row_query
    dims = tl.arange(0, VALUE_PAD)
    row_mask = row_valid[:, None] & (dims < VALUE_SIZE)[None, :]
    rest = VALUE_SIZE + tl.arange(0, REST_PAD)
    row_start = (row_token * NUM_HEADS + row_head).to(tl.int64) * ROW_SIZE
    query = tl.load(query_ptr + row_start[:, None] + dims[None, :], mask=row_mask, other=0.0)
    query_rest = tl.load(
        query_ptr + row_start[:, None] + rest[None, :],
        mask=row_valid[:, None] & (rest < ROW_SIZE)[None, :],
        other=0.0,
    )

    key_begin = 0
    key_end = computed + tl.minimum(first_query + BLOCK_Q, query_len)
    key_end = tl.minimum(key_end, tl.load(seq_lens_ptr + request))
    if IS_SPLIT:
        key_begin = tl.program_id(2) * SEGMENT_SIZE
        key_end = tl.minimum(key_end, key_begin + SEGMENT_SIZE)
        if key_begin >= key_end:
            return

    peak = tl.full([BLOCK_Q * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * HEADS], tl.float32)
    acc = tl.zeros([BLOCK_Q * HEADS, VALUE_PAD], tl.float32)
    scale_log2 = scale * 1.4426950408889634  # exp(x) = exp2(x * log2(e))
    for tile in range(key_begin, key_end, TILE):
        keys = tile + tl.arange(0, TILE)
        key_valid = keys < key_end
        blocks = tl.load(
            block_table_ptr + request * table_stride + keys // BLOCK_SIZE, mask=key_valid, other=0
        ).to(tl.int64)
        offsets = (blocks * BLOCK_SIZE + keys % BLOCK_SIZE) * ROW_SIZE
        latent = tl.load(
            cache_ptr + offsets[:, None] + dims[None, :],
            mask=key_valid[:, None] & (dims < VALUE_SIZE)[None, :],
            other=0.0,
        )  # [TILE, VALUE_PAD], of keys and values
        latent_rest = tl.load(
            cache_ptr + offsets[None, :] + rest[:, None],
            mask=(rest < ROW_SIZE)[:, None] & key_valid[None, :],
            other=0.0,
        )
        scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(query_rest, latent_rest, acc=scores, input_precision="ieee") * scale_log2
        seen = (keys[None, :] <= row_position[:, None]) & key_valid[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
        peak = new_peak

    row_out = (row_token * NUM_HEADS + row_head).to(tl.int64)
    if IS_SPLIT:
        slot = row_out * num_segments + tl.program_id(2)
        tl.store(partial_ptr + slot[:, None] * VALUE_SIZE + dims[None, :], acc, mask=row_mask)
        tl.store(stats_ptr + slot * 2, peak, mask=row_valid)
        tl.store(stats_ptr + slot * 2 + 1, total, mask=row_valid)
    else:
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(
            out_ptr + row_out[:, None] * VALUE_SIZE + dims[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=row_mask,
        )


def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    *,
    value_size: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    segment: int = SEGMENT,
) -> torch.Tensor:
    """See the module docstring. max_query_len, max_seq_len: host upper bounds."""
    num_tokens, num_heads, row_size = query.shape
    assert cache.is_contiguous(), "blocks and slots must follow one another"
    assert row_size * cache.itemsize % 16 == 0, "rows must start at addresses that vector loads can take"
    query = query.contiguous()
    is_split = max_query_len <= MAX_SPLIT_QUERY_LEN and max_seq_len > segment
    num_segments = -(-max_seq_len // segment) if is_split else 1
    heads = min(triton.next_power_of_2(num_heads), 16)
    block_q = (16 if max_query_len * heads <= 16 else 32) // heads
    value_pad = max(16, triton.next_power_of_2(value_size))
    # By shape and dtype only, never by the batch; two stages of rows must fit into shared memory.
    tile = min(32 if value_pad * cache.itemsize <= 1024 else 16, segment)
    out = torch.empty(num_tokens, num_heads, value_size, dtype=query.dtype, device=query.device)
    partial = stats = out
    if is_split:
        shape = (num_tokens, num_heads, num_segments)
        partial = torch.empty(*shape, value_size, dtype=torch.float32, device=query.device)
        stats = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
    num_q_blocks = num_tokens // block_q + len(seq_lens)
    _latent_attention_kernel[(num_q_blocks, triton.cdiv(num_heads, heads), num_segments)](
        query,
        cache,
        out,
        partial,
        stats,
        query_start_loc,
        seq_lens,
        positions,
        block_table,
        len(seq_lens),
        num_segments,
        scale,
        block_table.stride(0),
        NUM_HEADS=num_heads,
        HEADS=heads,
        BLOCK_Q=block_q,
        ROW_SIZE=row_size,
        VALUE_SIZE=value_size,
        VALUE_PAD=value_pad,
        REST_PAD=max(16, triton.next_power_of_2(row_size - value_size)),
        BLOCK_SIZE=cache.shape[1],
        TILE=tile,
        SEGMENT_SIZE=segment,
        IS_SPLIT=is_split,
        num_warps=8,
        num_stages=2,
        **launch_options(query.device),
    )
    if is_split:
        fold_segments_kernel[(num_tokens, num_heads)](
            partial,
            stats,
            out,
            positions,
            num_segments,
            WINDOW=0,
            NUM_HEADS=num_heads,
            HEAD_SIZE=value_size,
            HEAD_PAD=value_pad,
            SEGMENT=segment,
            num_warps=4,
            **launch_options(query.device),
        )
    return out
