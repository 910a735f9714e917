"""What a step runs over: the host's layout of it, joined with what only the request rows know.

A request of row r starts at position s = planned_starts, or, where that is -1, behind the row's computed tokens; its
token j stands at s + j, and holds state.token_history[r, s + j]. Keys end at s + its tokens, of a decode at s + 1 +
planned_drafts, and at the row's token limit at the latest: behind it nothing is stored (PAD_SLOT_ID), tokens there see
what is, and what they give is never emitted. A logits row j of a request draws the token behind the one that it
computes; if j < min(num_drafts[r], planned_drafts), a draft stands there in the history.
Example, block_size 4, table of the row [7, 2]: position 5 -> block index 1 -> block 2 -> slot 2 * 4 + 1 = 9.

Shapes: see `StepLayout`, `StepInputs`, `RowState`; block_tables [num_groups, rows, max_blocks] int32. No input is
written.
Grid: (request, KV group, part of the request's tokens). Of block tables the kernel copies what a step and its drafts
can reach, `num_ahead` tokens behind the last one; the rest stays as it was allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.row_state import RowState
from engine.kernels.triton_support import jit, tl
from engine.kv_spec import PAD_SLOT_ID

DECODE_TOKENS, CHUNK_TOKENS = 16, 256  # of one program
BLOCK_IDS = 1024  # block ids at a time


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """Which tokens of which rows a step computes: all that the host decides."""

    rows: torch.Tensor  # [num_reqs] int64
    planned_starts: torch.Tensor  # [num_reqs] int64; -1: where the row's computed tokens end
    planned_drafts: torch.Tensor  # [num_reqs] int64; drafts to verify, at most
    lens: torch.Tensor  # [num_reqs] int64; a decode may have more than the last token and its drafts: padding
    is_prefill: torch.Tensor  # [num_reqs] bool; planned_starts >= 0
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    logits_start: torch.Tensor  # [num_reqs + 1] int64
    token_reqs: torch.Tensor  # [num_tokens] int64; batch index
    token_offsets: torch.Tensor  # [num_tokens] int64; within its request
    logits_reqs: torch.Tensor  # [num_logits] int64; batch index
    logits_steps: torch.Tensor  # [num_logits] int64; index of the logits row within its request
    logits_indices: torch.Tensor  # [num_logits] int64; token index; the last ones of each request


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    starts: torch.Tensor  # [num_reqs] int64
    seq_lens: torch.Tensor  # [num_reqs] int32
    num_drafts: torch.Tensor  # [num_reqs] int64; valid drafts to verify
    positions: torch.Tensor  # [num_tokens] int64
    input_ids: torch.Tensor  # [num_tokens] int64
    slot_mappings: torch.Tensor  # [num_groups, num_tokens] int64
    block_tables: torch.Tensor  # [num_groups, num_reqs, max_blocks] int32
    logits_rows: torch.Tensor  # [num_logits] int64; request row
    logits_positions: torch.Tensor  # [num_logits] int64; position of the token to draw
    draft_ids: torch.Tensor  # [num_logits] int64; -1 where there is no draft


def step_inputs(
    layout: StepLayout,
    state: RowState,
    block_tables: torch.Tensor,
    block_size: int,
    *,
    max_query_len: int,
    num_ahead: int,
) -> StepInputs:
    """See the module docstring. `max_query_len`: of any of the requests."""
    if block_tables.is_cuda:
        return step_inputs_triton(
            layout, state, block_tables, block_size, max_query_len=max_query_len, num_ahead=num_ahead
        )
    return step_inputs_reference(layout, state, block_tables, block_size)


def step_inputs_reference(
    layout: StepLayout, state: RowState, block_tables: torch.Tensor, block_size: int
) -> StepInputs:
    """See the module docstring. Block tables are copied as a whole."""
    rows, token_reqs = layout.rows, layout.token_reqs
    starts = torch.where(layout.is_prefill, layout.planned_starts, state.num_computed_tokens[rows])
    positions = starts[token_reqs] + layout.token_offsets
    ends = starts + torch.where(layout.is_prefill, layout.lens, 1 + layout.planned_drafts)
    ends = torch.minimum(ends, state.token_limit[rows])
    token_rows, token_ends = rows[token_reqs], ends[token_reqs]
    drafts = torch.minimum(state.num_drafts[rows], layout.planned_drafts)
    logits_rows = rows[layout.logits_reqs]
    logits_positions = positions[layout.logits_indices] + 1
    next_ids = state.token_history[logits_rows, logits_positions].to(torch.int64)
    return StepInputs(
        starts=starts,
        seq_lens=ends.to(torch.int32),
        num_drafts=drafts,
        positions=positions,
        input_ids=state.token_history[token_rows, positions].to(torch.int64),
        slot_mappings=torch.stack(
            [slots_of(table, token_rows, positions, token_ends, block_size) for table in block_tables]
        ),
        block_tables=block_tables[:, rows],
        logits_rows=logits_rows,
        logits_positions=logits_positions,
        draft_ids=torch.where(layout.logits_steps < drafts[layout.logits_reqs], next_ids, -1),
    )


def slots_of(
    table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slots of tokens. table: [rows, max_blocks] int32, of one KV group; rows, positions, ends: [n] int64; returns
    [n] int64, PAD_SLOT_ID where a position is not below its end."""
    block_index = torch.div(positions, block_size, rounding_mode="floor")
    block_ids = table[rows, block_index.clamp(max=table.shape[1] - 1)].to(torch.int64)
    return torch.where(positions < ends, block_ids * block_size + positions % block_size, PAD_SLOT_ID)


@jit(do_not_specialize=["num_ahead"])
def _step_inputs_kernel(
    rows_ptr,
    planned_starts_ptr,
    planned_drafts_ptr,
    query_start_loc_ptr,
    logits_start_ptr,
    token_history_ptr,
    num_computed_tokens_ptr,
    num_drafts_ptr,
    token_limit_ptr,
    block_tables_ptr,
    starts_ptr,
    seq_lens_ptr,
    drafts_ptr,
    positions_ptr,
    input_ids_ptr,
    slots_ptr,
    own_tables_ptr,
    logits_rows_ptr,
    logits_positions_ptr,
    draft_ids_ptr,
    history_stride,
    table_rows,
    max_blocks,
    own_stride,
    num_ahead,
    BLOCK_SIZE: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    request, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_reqs = tl.num_programs(0)
    row = tl.load(rows_ptr + request)
    planned_start = tl.load(planned_starts_ptr + request)
    planned_drafts = tl.load(planned_drafts_ptr + request)
    first_token = tl.load(query_start_loc_ptr + request)
    num_tokens = tl.load(query_start_loc_ptr + request + 1) - first_token
    slots_stride = tl.load(query_start_loc_ptr + num_reqs)
    slots_stride += slots_stride % 2
    start = tl.where(planned_start >= 0, planned_start, tl.load(num_computed_tokens_ptr + row).to(tl.int64))
    end = start + tl.where(planned_start >= 0, num_tokens.to(tl.int64), 1 + planned_drafts)
    end = tl.minimum(end, tl.load(token_limit_ptr + row).to(tl.int64))

    offsets = part * TOKENS + tl.arange(0, TOKENS)
    is_token = offsets < num_tokens
    positions = start + offsets
    table = block_tables_ptr + (group * table_rows + row) * max_blocks
    is_stored = is_token & (positions < end)
    block_ids = tl.load(table + positions // BLOCK_SIZE, mask=is_stored, other=0).to(tl.int64)
    slots = tl.where(is_stored, block_ids * BLOCK_SIZE + positions % BLOCK_SIZE, PAD_SLOT)
    tl.store(slots_ptr + group.to(tl.int64) * slots_stride + first_token + offsets, slots, mask=is_token)

    if group == 0:
        drafts = tl.minimum(tl.load(num_drafts_ptr + row).to(tl.int64), planned_drafts)
        if part == 0:
            tl.store(starts_ptr + request, start)
            tl.store(seq_lens_ptr + request, end.to(tl.int32))
            tl.store(drafts_ptr + request, drafts)
        history = token_history_ptr + row * history_stride + positions
        tl.store(positions_ptr + first_token + offsets, positions, mask=is_token)
        input_ids = tl.load(history, mask=is_token, other=0).to(tl.int64)
        tl.store(input_ids_ptr + first_token + offsets, input_ids, mask=is_token)
        first_logit = tl.load(logits_start_ptr + request)
        num_logits = tl.load(logits_start_ptr + request + 1) - first_logit
        steps = offsets - (num_tokens - num_logits)
        is_logit = is_token & (steps >= 0)
        draft_ids = tl.load(history + 1, mask=is_logit & (steps < drafts), other=-1).to(tl.int64)
        tl.store(logits_rows_ptr + first_logit + steps, tl.zeros_like(positions) + row, mask=is_logit)
        tl.store(logits_positions_ptr + first_logit + steps, positions + 1, mask=is_logit)
        tl.store(draft_ids_ptr + first_logit + steps, draft_ids, mask=is_logit)

    if part == 0:
        own_table = own_tables_ptr + (group * num_reqs + request).to(tl.int64) * own_stride
        num_ids = tl.minimum((start + num_tokens + num_ahead) // BLOCK_SIZE + 1, max_blocks).to(tl.int32)
        for first_id in range(0, num_ids, BLOCK_IDS):
            ids = first_id + tl.arange(0, BLOCK_IDS)
            tl.store(own_table + ids, tl.load(table + ids, mask=ids < num_ids, other=0), mask=ids < num_ids)


def step_inputs_triton(
    layout: StepLayout,
    state: RowState,
    block_tables: torch.Tensor,
    block_size: int,
    *,
    max_query_len: int,
    num_ahead: int,
) -> StepInputs:
    num_groups, table_rows, max_blocks = block_tables.shape
    num_reqs, num_tokens, num_logits = len(layout.rows), len(layout.token_reqs), len(layout.logits_reqs)
    # Each group's part is aligned to 16 bytes: kernels that read it are compiled anew for other alignments.
    slots = layout.rows.new_empty(num_groups, num_tokens + num_tokens % 2)
    own_tables = block_tables.new_empty(num_groups, num_reqs, max_blocks + -max_blocks % 4)
    inputs = StepInputs(
        starts=layout.rows.new_empty(num_reqs),
        seq_lens=state.token_limit.new_empty(num_reqs),
        num_drafts=layout.rows.new_empty(num_reqs),
        positions=layout.rows.new_empty(num_tokens),
        input_ids=layout.rows.new_empty(num_tokens),
        slot_mappings=slots[:, :num_tokens],
        block_tables=own_tables[..., :max_blocks],
        logits_rows=layout.rows.new_empty(num_logits),
        logits_positions=layout.rows.new_empty(num_logits),
        draft_ids=layout.rows.new_empty(num_logits),
    )
    tokens = DECODE_TOKENS if max_query_len <= DECODE_TOKENS else CHUNK_TOKENS
    _step_inputs_kernel[(num_reqs, num_groups, -(-max_query_len // tokens))](
        layout.rows,
        layout.planned_starts,
        layout.planned_drafts,
        layout.query_start_loc,
        layout.logits_start,
        state.token_history,
        state.num_computed_tokens,
        state.num_drafts,
        state.token_limit,
        block_tables,
        inputs.starts,
        inputs.seq_lens,
        inputs.num_drafts,
        inputs.positions,
        inputs.input_ids,
        slots,
        own_tables,
        inputs.logits_rows,
        inputs.logits_positions,
        inputs.draft_ids,
        state.token_history.stride(0),
        table_rows,
        max_blocks,
        own_tables.stride(1),
        num_ahead,
        BLOCK_SIZE=block_size,
        PAD_SLOT=PAD_SLOT_ID,
        TOKENS=tokens,
        BLOCK_IDS=BLOCK_IDS,
        **launch_options(layout.rows.device),
    )
    return inputs
