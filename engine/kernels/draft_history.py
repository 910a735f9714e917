"""Reading and writing the rows' history while drafts are made.

`read_history`: the tokens at given positions, of ragged requests: result[t] = token_history[row of t, positions[t]
+ shift]. Grid: (request, part of its tokens).
`last_token`: the last known token, and the position behind it. Grid: one program a request.
`record_draft`: token_history[row, positions] = draft, so that penalties and bad words at the next position see it as
they will in the verification. An unusable draft (-1) ends the request's drafts, so any token does: it becomes 0, for
the history holds token ids only. Grid: one program a request.

Shapes: rows [num_reqs] int64; token_history [rows, capacity], num_tokens [rows] int32; query_start_loc [num_reqs + 1]
int32; positions [num_tokens], of drafts [num_reqs], int64; token ids int64. Positions + shift are below the capacity;
those of drafts may lie behind it where no draft is used, and then stand for its end, which no valid token uses.
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit, tl

DECODE_TOKENS, CHUNK_TOKENS = 16, 256  # of one program


def read_history(
    token_history: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    *,
    shift: int,
    max_query_len: int,
) -> torch.Tensor:
    """See the module docstring. Returns [num_tokens] int64; `max_query_len`: of any of the requests."""
    if rows.is_cuda:
        return read_history_triton(
            token_history, rows, query_start_loc, positions, shift=shift, max_query_len=max_query_len
        )
    return read_history_reference(token_history, rows, query_start_loc, positions, shift=shift)


def read_history_reference(
    token_history: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    *,
    shift: int,
) -> torch.Tensor:
    lens = torch.diff(query_start_loc).to(torch.int64)
    token_rows = torch.repeat_interleave(rows, lens, output_size=len(positions))
    return token_history[token_rows, positions + shift].to(torch.int64)


@jit
def _read_history_kernel(
    token_history_ptr,
    rows_ptr,
    query_start_loc_ptr,
    positions_ptr,
    token_ids_ptr,
    history_stride,
    SHIFT: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request)
    first = tl.load(query_start_loc_ptr + request)
    end = tl.load(query_start_loc_ptr + request + 1)
    tokens = first + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    positions = tl.load(positions_ptr + tokens, mask=tokens < end, other=0)
    history = token_history_ptr + row * history_stride + positions + SHIFT
    token_ids = tl.load(history, mask=tokens < end, other=0)
    tl.store(token_ids_ptr + tokens, token_ids.to(tl.int64), mask=tokens < end)


def read_history_triton(
    token_history: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    *,
    shift: int,
    max_query_len: int,
) -> torch.Tensor:
    token_ids = torch.empty_like(positions)
    tokens = DECODE_TOKENS if max_query_len <= DECODE_TOKENS else CHUNK_TOKENS
    _read_history_kernel[(len(rows), -(-max_query_len // tokens))](
        token_history,
        rows,
        query_start_loc,
        positions,
        token_ids,
        token_history.stride(0),
        SHIFT=shift,
        TOKENS=tokens,
        num_warps=1,
        **launch_options(rows.device),
    )
    return token_ids


def last_token(
    token_history: torch.Tensor, rows: torch.Tensor, num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module docstring. Returns [num_reqs] int64 each; the token of a row without any is void."""
    operation = last_token_triton if rows.is_cuda else last_token_reference
    return operation(token_history, rows, num_tokens)


def last_token_reference(
    token_history: torch.Tensor, rows: torch.Tensor, num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ends = num_tokens[rows].to(torch.int64)
    return token_history[rows, (ends - 1).clamp(min=0)].to(torch.int64), ends


@jit
def _last_token_kernel(
    token_history_ptr,
    rows_ptr,
    num_tokens_ptr,
    token_ids_ptr,
    ends_ptr,
    history_stride,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request)
    end = tl.load(num_tokens_ptr + row)
    token_id = tl.load(token_history_ptr + row * history_stride + tl.maximum(end - 1, 0))
    tl.store(token_ids_ptr + request, token_id.to(tl.int64))
    tl.store(ends_ptr + request, end.to(tl.int64))


def last_token_triton(
    token_history: torch.Tensor, rows: torch.Tensor, num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids, ends = torch.empty_like(rows), torch.empty_like(rows)
    _last_token_kernel[(len(rows),)](
        token_history,
        rows,
        num_tokens,
        token_ids,
        ends,
        token_history.stride(0),
        num_warps=1,
        **launch_options(rows.device),
    )
    return token_ids, ends


def record_draft(
    token_history: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, draft: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module docstring. Returns the tokens written and the positions behind them, [num_reqs] int64 each."""
    operation = record_draft_triton if rows.is_cuda else record_draft_reference
    return operation(token_history, rows, positions, draft)


def record_draft_reference(
    token_history: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, draft: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids = draft.clamp(min=0)
    token_history[rows, positions.clamp(max=token_history.shape[1] - 1)] = token_ids.to(torch.int32)
    return token_ids, positions + 1


@jit
def _record_draft_kernel(
    token_history_ptr,
    rows_ptr,
    positions_ptr,
    draft_ptr,
    token_ids_ptr,
    next_positions_ptr,
    history_stride,
    capacity,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    request = tl.program_id(0)
    position = tl.load(positions_ptr + request)
    token_id = tl.maximum(tl.load(draft_ptr + request), 0)
    history = token_history_ptr + tl.load(rows_ptr + request) * history_stride
    tl.store(history + tl.minimum(position, capacity - 1), token_id.to(tl.int32))
    tl.store(token_ids_ptr + request, token_id)
    tl.store(next_positions_ptr + request, position + 1)


def record_draft_triton(
    token_history: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, draft: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids, next_positions = torch.empty_like(draft), torch.empty_like(positions)
    _record_draft_kernel[(len(rows),)](
        token_history,
        rows,
        positions,
        draft,
        token_ids,
        next_positions,
        token_history.stride(0),
        token_history.shape[1],
        num_warps=1,
        **launch_options(rows.device),
    )
    return token_ids, next_positions
