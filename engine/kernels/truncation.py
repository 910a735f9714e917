"""Which tokens top_k and top_p leave of each row, as the key of the last one (token_order.py), without sorting the row.

The rule is that of top_k_top_p.py. Probabilities are summed as integers, floor(exp((x - x_max) / t) * 2^40), so that
sums depend on no order; the whole row's is a float32 sum by blocks. Against the reference a token at the very edge of
top_p may be kept or not; on one device it depends on the row alone.

1. Each block lists its 64 first tokens. A block is many short runs of the row, because frequent tokens stand together.
2. Down to the highest end of a list (the seam) everything is listed: there the edge is looked for, by bisection. With
   top_k <= 64 it always lies there, with more, or with top_p, nearly always.
3. Otherwise the row is read again and again, until there are few enough between the bounds to be listed.

Shapes: as in token_draw.py. firsts [n, blocks] int64: the first token's key of each block; lists [n, blocks * 64]
int64, in no order; seams [n, blocks] int64: the block's keys above it are listed; masses [n, blocks] float32, relative
to the block's largest logit. Result: bounds [n] int64, NO_KEY in rows that keep all. Grid: (rows, blocks), then (rows,)
(which overwrites `lists` in step 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.key_search import find_edge, keys_between, last_kept, measure, probabilities
from engine.kernels.token_order import id_bits, key_of, load_tokens, value_of
from engine.kernels.triton_support import jit, next_power_of_2, tl

BLOCK = 2048  # columns of a program
LIST = 64
_CHUNK = 4096  # columns read at a time in step 3


@dataclass(frozen=True)
class RowTables:
    """What requests ask, by request row: views of columns of two tables, [rows] each."""

    seeds: torch.Tensor  # int64
    top_k: torch.Tensor  # int64; 0: off
    temperature: torch.Tensor  # float64
    top_p: torch.Tensor  # float64; 1: off
    min_p: torch.Tensor  # float64; 0: off

    @property
    def strides(self) -> tuple[int, int]:
        """Of the integers and of the reals."""
        return self.seeds.stride(0), self.temperature.stride(0)


@jit
def block_columns(block, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of a block: runs of 64, a run of every block after the other. [BLOCK] int32."""
    lanes = tl.arange(0, BLOCK)
    return (lanes // 64) * (64 * NUM_BLOCKS) + block * 64 + lanes % 64


@jit
def row_temperature(temperature_ptr, request, stride):
    """float32, larger than 0 in random rows."""
    temperature = tl.load(temperature_ptr + request * stride)
    return tl.where(temperature > 0.0, tl.maximum(temperature.to(tl.float32), 1.1754943508222875e-38), 0.0)


@jit
def _truncates(top_k, top_p, temperature, NUM_COLUMNS: tl.constexpr):
    return (temperature > 0.0) & (((top_k > 0) & (top_k < NUM_COLUMNS)) | (top_p < 1.0))


@jit
def _lists_kernel(
    logits_ptr,
    ids_ptr,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    temperature_ptr,
    firsts_ptr,
    lists_ptr,
    seams_ptr,
    masses_ptr,
    logits_stride,
    ids_stride,
    integers_stride,
    reals_stride,
    NUM_COLUMNS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(rows_ptr + row)
    top_k = tl.load(top_k_ptr + request * integers_stride)
    top_p = tl.load(top_p_ptr + request * reals_stride)
    temperature = row_temperature(temperature_ptr, request, reals_stride)
    columns = block_columns(block, NUM_BLOCKS, BLOCK)
    values, ids = load_tokens(
        logits_ptr + row * logits_stride, ids_ptr + row * ids_stride, columns, NUM_COLUMNS, HAS_IDS
    )
    keys = tl.where(columns < NUM_COLUMNS, key_of(values, ids, ID_BITS), -(1 << 62))
    first = tl.max(keys, axis=0)
    place = row * NUM_BLOCKS + block
    tl.store(firsts_ptr + place, first)
    if _truncates(top_k, top_p, temperature, NUM_COLUMNS):
        is_there = columns < NUM_COLUMNS
        lowest = tl.min(tl.where(is_there, keys, first), axis=0)
        needed = tl.full((), LIST, tl.int64)
        end = last_kept(keys, is_there.to(tl.int64), needed, lowest, first + 1, 0, True)
        is_listed = is_there & (keys >= end)
        tl.store(seams_ptr + place, tl.where(end > lowest, end - 1, -(1 << 62)))
        tl.store(lists_ptr + place * LIST + tl.arange(0, LIST), tl.full([LIST], -(1 << 62), tl.int64))
        tl.debug_barrier()
        places = place * LIST + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
        tl.store(lists_ptr + places, keys, mask=is_listed)
        largest = tl.max(values, axis=0)
        base = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
        tl.store(masses_ptr + place, tl.sum(probabilities(values, base, temperature), axis=0))


@jit
def _bounds_kernel(
    logits_ptr,
    ids_ptr,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    temperature_ptr,
    firsts_ptr,
    lists_ptr,
    seams_ptr,
    masses_ptr,
    bounds_ptr,
    logits_stride,
    ids_stride,
    integers_stride,
    reals_stride,
    NUM_COLUMNS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,  # the next power of two
    UNION: tl.constexpr,  # BLOCKS * LIST
    HAS_IDS: tl.constexpr,
    ID_BITS: tl.constexpr,
    LIST: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(rows_ptr + row)
    top_k = tl.load(top_k_ptr + request * integers_stride)
    top_p = tl.load(top_p_ptr + request * reals_stride)
    temperature = row_temperature(temperature_ptr, request, reals_stride)
    blocks = tl.arange(0, BLOCKS)
    is_block = blocks < NUM_BLOCKS
    firsts = tl.load(firsts_ptr + row * NUM_BLOCKS + blocks, mask=is_block, other=-(1 << 62))
    largest = value_of(tl.max(firsts, axis=0), ID_BITS)
    bound = tl.full((), -(1 << 62), tl.int64)
    if _truncates(top_k, top_p, temperature, NUM_COLUMNS) & (tl.abs(largest) < float("inf")):
        lists = lists_ptr + row * (NUM_BLOCKS * LIST)
        lanes = tl.arange(0, UNION)
        listed = tl.load(lists + lanes, mask=lanes < NUM_BLOCKS * LIST, other=-(1 << 62))
        seams = tl.load(seams_ptr + row * NUM_BLOCKS + blocks, mask=is_block, other=-(1 << 62))
        seam = tl.max(seams, axis=0)
        logits_row, ids_row = logits_ptr + row * logits_stride, ids_ptr + row * ids_stride
        relative = tl.load(masses_ptr + row * NUM_BLOCKS + blocks, mask=is_block, other=0.0)
        block_largest = tl.where(is_block, value_of(firsts, ID_BITS), float("-inf"))
        masses = relative * probabilities(block_largest, largest, temperature)
        total = tl.sum(masses, axis=0).to(tl.float64) * 1099511627776.0
        if (top_k > 0) & (top_k < NUM_COLUMNS):
            bound = find_edge(
                listed,
                seam,
                top_k,
                logits_row,
                ids_row,
                lists,
                largest,
                temperature,
                False,
                NUM_COLUMNS,
                NUM_BLOCKS * LIST,
                HAS_IDS,
                ID_BITS,
                UNION,
                CHUNK,
            )
            if top_p < 1.0:  # of what top_k leaves
                sums = tl.zeros([CHUNK], tl.int64)
                if bound > seam:
                    kept = tl.where(listed >= bound, listed, -(1 << 62))
                    total = tl.sum(measure(kept, largest, temperature, True, ID_BITS), axis=0).to(tl.float64)
                else:
                    for start in range(0, NUM_COLUMNS, CHUNK):
                        keys = keys_between(
                            logits_row,
                            ids_row,
                            start,
                            bound,
                            1 << 62,
                            NUM_COLUMNS,
                            HAS_IDS,
                            ID_BITS,
                            CHUNK,
                        )
                        sums += measure(keys, largest, temperature, True, ID_BITS)
                    total = tl.sum(sums, axis=0).to(tl.float64)
        if top_p < 1.0:
            bound = find_edge(
                listed,
                seam,
                tl.ceil(top_p * total).to(tl.int64),
                logits_row,
                ids_row,
                lists,
                largest,
                temperature,
                True,
                NUM_COLUMNS,
                NUM_BLOCKS * LIST,
                HAS_IDS,
                ID_BITS,
                UNION,
                CHUNK,
            )
    tl.store(bounds_ptr + row, bound)


def row_bounds(
    logits: torch.Tensor,
    candidate_ids: torch.Tensor | None,
    rows: torch.Tensor,
    tables: RowTables,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(firsts, bounds). See the module docstring."""
    num_rows, num_columns = logits.shape
    num_blocks = -(-num_columns // BLOCK)
    firsts = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    lists = torch.empty(num_rows, num_blocks * LIST, dtype=torch.int64, device=logits.device)
    seams = torch.empty_like(firsts)
    masses = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    bounds = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    ids = logits if candidate_ids is None else candidate_ids
    tokens = (logits, ids, rows, tables.top_k, tables.top_p, tables.temperature, firsts, lists, seams, masses)
    strides = (logits.stride(0), ids.stride(0), *tables.strides)
    shape: dict[str, Any] = {
        "NUM_COLUMNS": num_columns,
        "NUM_BLOCKS": num_blocks,
        "HAS_IDS": candidate_ids is not None,
        "ID_BITS": id_bits(vocab_size),
        "LIST": LIST,
        "enable_fp_fusion": False,
        **launch_options(logits.device),
    }
    _lists_kernel[(num_rows, num_blocks)](*tokens, *strides, **shape, BLOCK=BLOCK)
    blocks = next_power_of_2(num_blocks)
    _bounds_kernel[(num_rows,)](
        *tokens, bounds, *strides, **shape, BLOCKS=blocks, UNION=blocks * LIST, CHUNK=_CHUNK, num_warps=16
    )
    return firsts, bounds
