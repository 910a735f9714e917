"""Which of a request's proposed drafts stand: the leading ones that are token ids, as many as it can use.

A draft stands if it and all before it are >= 0 and < vocab_size, and there are at most min(num_draft_tokens,
num_usable) of them. With `state` they are also written behind the known tokens of their rows, with their number.
Example, 3 usable, drafts [5, 9, -1, 4]: 2 stand, [5, 9, -1, -1], and the row is bad: a draft that was wanted is no
token.

Shapes: token_ids [num_reqs, k] int64, k may be 0; num_draft_tokens, num_usable, rows [num_reqs] int64; see `RowState`,
of which history and num_drafts are written. Rows are distinct where drafts stand. Grid: one program a request.
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.emit_runs import write_tokens_reference
from engine.kernels.row_state import RowState
from engine.kernels.triton_support import draft_width, jit, tl

Checked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""token_ids [num_reqs, k] int64, -1 behind those that stand; their number [num_reqs] int64; is_bad [num_reqs] bool."""


def check_drafts(
    token_ids: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    num_usable: torch.Tensor,
    vocab_size: int,
    rows: torch.Tensor,
    state: RowState | None,
) -> Checked:
    """See the module docstring."""
    operation = check_drafts_triton if token_ids.is_cuda else check_drafts_reference
    return operation(token_ids, num_draft_tokens, num_usable, vocab_size, rows, state)


def check_drafts_reference(
    token_ids: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    num_usable: torch.Tensor,
    vocab_size: int,
    rows: torch.Tensor,
    state: RowState | None,
) -> Checked:
    """See the module docstring."""
    steps = torch.arange(token_ids.shape[1], device=token_ids.device)
    wanted = torch.minimum(num_draft_tokens, num_usable)
    valid = (token_ids >= 0) & (token_ids < vocab_size) & (steps < wanted[:, None])
    valid = valid.cumprod(dim=1).bool()
    num_valid = valid.sum(dim=1)
    standing = torch.where(valid, token_ids, -1)
    if state is not None:
        known = state.num_tokens[rows].to(torch.int64)
        write_tokens_reference(state.token_history, rows, known, standing, num_valid)
        state.num_drafts[rows] = num_valid.to(torch.int32)
    return standing, num_valid, num_valid < wanted


@jit(do_not_specialize=["num_drafts"])
def _check_drafts_kernel(
    token_ids_ptr,
    num_draft_tokens_ptr,
    num_usable_ptr,
    rows_ptr,
    token_history_ptr,
    num_tokens_ptr,
    num_drafts_ptr,
    standing_ptr,
    num_valid_ptr,
    is_bad_ptr,
    history_stride,
    vocab_size,
    num_drafts,
    WIDTH: tl.constexpr,
    WRITES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    request = tl.program_id(0)
    steps = tl.arange(0, WIDTH)
    wanted = tl.minimum(tl.load(num_draft_tokens_ptr + request), tl.load(num_usable_ptr + request))
    is_wanted = (steps < num_drafts) & (steps < wanted)
    token_ids = tl.load(token_ids_ptr + request * num_drafts + steps, mask=is_wanted, other=-1)
    is_token = (token_ids >= 0) & (token_ids < vocab_size)
    num_valid = tl.min(tl.where(is_token, WIDTH, steps), axis=0).to(tl.int64)
    stands = steps < num_valid
    tl.store(
        standing_ptr + request * num_drafts + steps, tl.where(stands, token_ids, -1), mask=steps < num_drafts
    )
    tl.store(num_valid_ptr + request, num_valid)
    tl.store(is_bad_ptr + request, num_valid < wanted)
    if WRITES:
        row = tl.load(rows_ptr + request)
        known = tl.load(num_tokens_ptr + row)
        history = token_history_ptr + row * history_stride + known + steps
        tl.store(history, token_ids.to(tl.int32), mask=stands)
        tl.store(num_drafts_ptr + row, num_valid.to(tl.int32))


def check_drafts_triton(
    token_ids: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    num_usable: torch.Tensor,
    vocab_size: int,
    rows: torch.Tensor,
    state: RowState | None,
) -> Checked:
    num_reqs, num_drafts = token_ids.shape
    standing = token_ids.new_empty(num_reqs, num_drafts)
    num_valid = rows.new_empty(num_reqs)
    is_bad = rows.new_empty(num_reqs, dtype=torch.bool)
    _check_drafts_kernel[(num_reqs,)](
        token_ids.contiguous(),
        num_draft_tokens,
        num_usable,
        rows,
        None if state is None else state.token_history,
        None if state is None else state.num_tokens,
        None if state is None else state.num_drafts,
        standing,
        num_valid,
        is_bad,
        0 if state is None else state.token_history.stride(0),
        vocab_size,
        num_drafts,
        WIDTH=draft_width(num_drafts + 1),
        WRITES=state is not None,
        num_warps=1,
        **launch_options(rows.device),
    )
    return standing, num_valid, is_bad
