"""The token of each logits row: the largest logit, or a draw with keyed noise, by the parameters of its request.

Of a row with logits x, the largest x_max, temperature t:
    t = 0: the token that stands first (token_order.py).
    t > 0: of the tokens with (x - x_max) / t >= log(min_p), and as far as top_k and top_p leave them (truncation.py),
           the one with the largest (x - x_max) / t + g, g of keyed_noise.py; of equal scores the lowest id.
A row whose x_max is not finite, or with NaN, is bad and gets token 0, or another `bad_id`.

`draws` and `truncates` say which launches there are, not what a row does. Each row takes its own way through them, so
its token is the same with every choice that does for it:
- neither: the first token of each block of columns, then the first of these.
- draws: between them the best score of each block.
- truncates as well: first each row's bound, the key of the last token that is kept.

Shapes: logits [n, m] float16, bfloat16 or float32, rows dense, read as they are; candidate_ids [n, m] int64, distinct
in a row and below vocab_size, else column = id; rows (request rows), positions [n] int64. Result: token_ids [n] int64,
is_bad [n] bool. Grid: (rows, blocks of columns), then (rows,). Arithmetic is in float32 and without fused products, so
that it rounds alike in all kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.keyed_noise import TARGET_STREAM, gumbel, row_key
from engine.kernels.token_order import id_bits, id_of, key_of, load_tokens, value_of
from engine.kernels.triton_support import jit, next_power_of_2, tl
from engine.kernels.truncation import BLOCK, RowTables, block_columns, row_bounds, row_temperature


@jit
def _firsts_kernel(
    logits_ptr,
    ids_ptr,
    firsts_ptr,
    logits_stride,
    ids_stride,
    NUM_COLUMNS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block_columns(block, NUM_BLOCKS, BLOCK)
    values, ids = load_tokens(
        logits_ptr + row * logits_stride, ids_ptr + row * ids_stride, columns, NUM_COLUMNS, HAS_IDS
    )
    # The largest key. Keys are wide integers: of each column they would take longer than reading it.
    largest = tl.max(values, axis=0)
    is_first = (values == largest) & (columns < NUM_COLUMNS)
    first_id = tl.min(tl.where(is_first, ids, 1 << 30), axis=0)  # behind all ids
    tl.store(firsts_ptr + row * NUM_BLOCKS + block, key_of(largest, first_id, ID_BITS))


@jit
def _scores_kernel(
    logits_ptr,
    ids_ptr,
    rows_ptr,
    positions_ptr,
    seeds_ptr,
    temperature_ptr,
    min_p_ptr,
    firsts_ptr,
    bounds_ptr,
    scores_ptr,
    logits_stride,
    ids_stride,
    integers_stride,
    reals_stride,
    STREAM: tl.constexpr,
    TRUNCATES: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,  # the next power of two
    HAS_IDS: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(rows_ptr + row)
    temperature = row_temperature(temperature_ptr, request, reals_stride)
    if temperature > 0.0:
        blocks = tl.arange(0, BLOCKS)
        firsts = tl.load(firsts_ptr + row * NUM_BLOCKS + blocks, mask=blocks < NUM_BLOCKS, other=-(1 << 62))
        largest = value_of(tl.max(firsts, axis=0), ID_BITS)
        largest = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)  # a bad row, whatever is drawn
        columns = block_columns(block, NUM_BLOCKS, BLOCK)
        values, ids = load_tokens(
            logits_ptr + row * logits_stride, ids_ptr + row * ids_stride, columns, NUM_COLUMNS, HAS_IDS
        )
        is_kept = columns < NUM_COLUMNS
        if TRUNCATES:
            is_kept &= key_of(values, ids, ID_BITS) >= tl.load(bounds_ptr + row)
        relative = tl.div_rn(values - largest, temperature)
        min_p = tl.load(min_p_ptr + request * reals_stride).to(tl.float32)
        if min_p > 0.0:
            is_kept &= relative >= tl.log(min_p)
        key = row_key(tl.load(seeds_ptr + request * integers_stride), tl.load(positions_ptr + row), STREAM)
        scores = key_of(relative + gumbel(key, ids), ids, ID_BITS)
        best = tl.max(tl.where(is_kept, scores, -(1 << 62)), axis=0)
        tl.store(scores_ptr + row * NUM_BLOCKS + block, best)


@jit
def _tokens_kernel(
    firsts_ptr,
    scores_ptr,
    rows_ptr,
    temperature_ptr,
    token_ids_ptr,
    is_bad_ptr,
    reals_stride,
    DRAWS: tl.constexpr,
    BAD_ID: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ID_BITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    places, is_block = row * NUM_BLOCKS + blocks, blocks < NUM_BLOCKS
    chosen = tl.max(tl.load(firsts_ptr + places, mask=is_block, other=-(1 << 62)), axis=0)
    is_bad = tl.abs(value_of(chosen, ID_BITS)) == float("inf")
    if DRAWS:  # noqa: SIM102 - known when compiled
        if row_temperature(temperature_ptr, tl.load(rows_ptr + row), reals_stride) > 0.0:
            chosen = tl.max(tl.load(scores_ptr + places, mask=is_block, other=-(1 << 62)), axis=0)
    tl.store(token_ids_ptr + row, tl.where(is_bad, BAD_ID, id_of(chosen, ID_BITS)))
    tl.store(is_bad_ptr + row, is_bad)


def draw_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: RowTables,
    *,
    vocab_size: int,
    draws: bool,
    truncates: bool,
    candidate_ids: torch.Tensor | None = None,
    stream: int = TARGET_STREAM,
    bad_id: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token_ids, is_bad). See the module docstring."""
    num_rows, num_columns = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_bad = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return token_ids, is_bad
    assert logits.stride(1) == 1
    assert candidate_ids is None or candidate_ids.stride(1) == 1
    rows, positions = rows.contiguous(), positions.contiguous()
    num_blocks = -(-num_columns // BLOCK)
    ids = logits if candidate_ids is None else candidate_ids
    blocks: dict[str, Any] = {
        "NUM_BLOCKS": num_blocks,
        "ID_BITS": id_bits(vocab_size),
        **launch_options(logits.device),
    }
    columns = {"NUM_COLUMNS": num_columns, "HAS_IDS": candidate_ids is not None, "BLOCK": BLOCK, **blocks}
    if truncates:
        firsts, bounds = row_bounds(logits, candidate_ids, rows, tables, vocab_size)
    else:
        firsts = bounds = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits.device)
        _firsts_kernel[(num_rows, num_blocks)](
            logits, ids, firsts, logits.stride(0), ids.stride(0), **columns
        )
    scores = torch.empty_like(firsts) if draws else firsts
    if draws:
        _scores_kernel[(num_rows, num_blocks)](
            logits,
            ids,
            rows,
            positions,
            tables.seeds,
            tables.temperature,
            tables.min_p,
            firsts,
            bounds,
            scores,
            logits.stride(0),
            ids.stride(0),
            *tables.strides,
            STREAM=stream,
            TRUNCATES=truncates,
            BLOCKS=next_power_of_2(num_blocks),
            enable_fp_fusion=False,
            **columns,
        )
    _tokens_kernel[(num_rows,)](
        firsts,
        scores,
        rows,
        tables.temperature,
        token_ids,
        is_bad,
        tables.strides[1],
        DRAWS=draws,
        BAD_ID=bad_id,
        BLOCKS=next_power_of_2(num_blocks),
        num_warps=1,
        **blocks,
    )
    return token_ids, is_bad
