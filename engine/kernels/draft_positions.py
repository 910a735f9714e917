"""Where each request's draft step stands, and where it stores its KV.

The token fed in step j is the one before the draft that is being made, at drawn_at - 1 + j; `offset` is the distance of
the row's own position from drawn_at + j, 1, or 2 where a row pairs a token with the hidden state before it. A request
with num_usable <= j stands at 0 and stores nothing: its known tokens may end far beyond the host's bounds, which
kernels rely on, and it has no slots. Others store below their token limit, if the drafter has a cache of its own.
Example, block_size 4, drawn_at 7, offset 2, step 1, table of the row [7, 2]: position 6 -> slot 2 * 4 + 2 = 10.

Shapes: drawn_at, num_usable, rows [num_reqs] int64; token_limit [rows] int32; block_tables [num_groups, rows,
max_blocks] int32; result see `DraftPositions`. Grid: one program a request and KV group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.step_inputs import slots_of
from engine.kernels.triton_support import jit, tl
from engine.kv_spec import PAD_SLOT_ID


@dataclass(frozen=True)
class DraftPositions:
    positions: torch.Tensor  # [num_reqs] int64
    seq_lens: torch.Tensor  # [num_reqs] int32; positions + 1
    slot_mappings: torch.Tensor  # [num_groups, num_reqs] int64
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32; one token a request


def draft_positions(
    drawn_at: torch.Tensor,
    num_usable: torch.Tensor,
    rows: torch.Tensor,
    token_limit: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    step: int,
    offset: int,
    stores: bool,
) -> DraftPositions:
    """See the module docstring."""
    operation = draft_positions_triton if rows.is_cuda else draft_positions_reference
    return operation(
        drawn_at,
        num_usable,
        rows,
        token_limit,
        block_tables,
        block_size=block_size,
        step=step,
        offset=offset,
        stores=stores,
    )


def draft_positions_reference(
    drawn_at: torch.Tensor,
    num_usable: torch.Tensor,
    rows: torch.Tensor,
    token_limit: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    step: int,
    offset: int,
    stores: bool,
) -> DraftPositions:
    is_usable = step < num_usable
    positions = torch.where(is_usable, drawn_at + (step - offset), 0)
    if stores:
        limits = torch.where(is_usable, token_limit[rows].to(torch.int64), 0)
        slots = torch.stack([slots_of(table, rows, positions, limits, block_size) for table in block_tables])
    else:
        slots = rows.new_full((len(block_tables), len(rows)), PAD_SLOT_ID)
    query_start_loc = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
    return DraftPositions(positions, (positions + 1).to(torch.int32), slots, query_start_loc)


@jit(do_not_specialize=["step", "offset"])
def _draft_positions_kernel(
    drawn_at_ptr,
    num_usable_ptr,
    rows_ptr,
    token_limit_ptr,
    block_tables_ptr,
    positions_ptr,
    seq_lens_ptr,
    slots_ptr,
    query_start_loc_ptr,
    table_rows,
    max_blocks,
    step,
    offset,
    BLOCK_SIZE: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    STORES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    request, group = tl.program_id(0), tl.program_id(1)
    num_reqs = tl.num_programs(0)
    row = tl.load(rows_ptr + request)
    is_usable = step < tl.load(num_usable_ptr + request)
    position = tl.where(is_usable, tl.load(drawn_at_ptr + request) + step - offset, 0)
    slots = slots_ptr + group * (num_reqs + num_reqs % 2) + request
    if STORES:
        is_stored = is_usable & (position < tl.load(token_limit_ptr + row))
        table = block_tables_ptr + (group * table_rows + row) * max_blocks
        block_id = tl.load(table + position // BLOCK_SIZE, mask=is_stored, other=0).to(tl.int64)
        tl.store(slots, tl.where(is_stored, block_id * BLOCK_SIZE + position % BLOCK_SIZE, PAD_SLOT))
    else:
        tl.store(slots, tl.full([], PAD_SLOT, tl.int64))
    if group == 0:
        tl.store(positions_ptr + request, position)
        tl.store(seq_lens_ptr + request, (position + 1).to(tl.int32))
        tl.store(query_start_loc_ptr + request, request)
        tl.store(query_start_loc_ptr + num_reqs, num_reqs)  # by every program alike


def draft_positions_triton(
    drawn_at: torch.Tensor,
    num_usable: torch.Tensor,
    rows: torch.Tensor,
    token_limit: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    step: int,
    offset: int,
    stores: bool,
) -> DraftPositions:
    num_groups, table_rows, max_blocks = block_tables.shape
    num_reqs = len(rows)
    slots = rows.new_empty(num_groups, num_reqs + num_reqs % 2)  # aligned as in engine/kernels/step_inputs.py
    result = DraftPositions(
        positions=rows.new_empty(num_reqs),
        seq_lens=token_limit.new_empty(num_reqs),
        slot_mappings=slots[:, :num_reqs],
        query_start_loc=token_limit.new_empty(num_reqs + 1),
    )
    _draft_positions_kernel[(num_reqs, num_groups)](
        drawn_at,
        num_usable,
        rows,
        token_limit,
        block_tables,
        result.positions,
        result.seq_lens,
        slots,
        result.query_start_loc,
        table_rows,
        max_blocks,
        step,
        offset,
        BLOCK_SIZE=block_size,
        PAD_SLOT=PAD_SLOT_ID,
        STORES=stores,
        num_warps=1,
        **launch_options(rows.device),
    )
    return result
