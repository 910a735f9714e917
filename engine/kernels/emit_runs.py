"""What a verification emits, and what it leaves in the request rows.

A run is a request's leading accepted drafts and the token of the logits row after them, as far as the row has room:
token_limit - num_tokens. A request without logits rows emits nothing. The run is appended to the row's history; a chunk
of a prompt computes all its tokens, a verification only the last token and the accepted drafts, as many as it emits.
No drafts stand behind it any more.
Example, three requests, max_drafts 2, logits_start [0, 3, 3, 5]:
    logits row   0   1   2  |  3   4
    drafts       5   6  -1  |  7  -1
    token_ids    5   4   2  |  7   3
    is_accepted  x          |  x
Request 0 emits [5, 4], request 1 nothing, request 2 emits [7, 3].

Shapes: token_ids [num_logits] int64, the token of each logits row, where a draft is accepted the draft itself;
is_accepted [num_logits] bool, False in the last row of a request; is_bad [num_logits] bool; see `RowState`, of which
all but token_limit is written. Rows of requests that emit something are distinct.
Grid: one program a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.row_state import RowState
from engine.kernels.triton_support import draft_width, jit, tl


class VerifiedBatch(Protocol):
    """As much of a step as a verification needs."""

    @property
    def rows(self) -> torch.Tensor: ...  # [num_reqs] int64; request row

    @property
    def starts(self) -> torch.Tensor: ...  # [num_reqs] int64; first position

    @property
    def query_lens(self) -> torch.Tensor: ...  # [num_reqs] int64; scheduled tokens

    @property
    def is_prefill(self) -> torch.Tensor: ...  # [num_reqs] bool

    @property
    def logits_start(self) -> torch.Tensor: ...  # [num_reqs + 1] int64; first logits row

    @property
    def max_drafts(self) -> int: ...  # of any request


@dataclass(frozen=True)
class Verification:
    """In batch order."""

    token_ids: torch.Tensor  # [num_reqs, max_drafts + 1] int64; the emitted run, -1 beyond it
    num_emitted: (
        torch.Tensor
    )  # [num_reqs] int64; accepted drafts + 1, as far as there is room; 0: did not sample
    num_accepted: torch.Tensor  # [num_reqs] int64; accepted drafts, whether or not the run had room for them
    is_bad: torch.Tensor  # [num_reqs] bool; a token of the emitted run came from unusable logits


def emit_runs(
    token_ids: torch.Tensor,
    is_accepted: torch.Tensor,
    is_bad: torch.Tensor,
    batch: VerifiedBatch,
    state: RowState,
) -> tuple[Verification, torch.Tensor]:
    """See the module docstring. The runs, and the scheduled tokens whose KV is void, [num_reqs] int64."""
    operation = emit_runs_triton if token_ids.is_cuda else emit_runs_reference
    return operation(token_ids, is_accepted, is_bad, batch, state)


def emit_runs_reference(
    token_ids: torch.Tensor,
    is_accepted: torch.Tensor,
    is_bad: torch.Tensor,
    batch: VerifiedBatch,
    state: RowState,
) -> tuple[Verification, torch.Tensor]:
    """See the module docstring."""
    rows = batch.rows
    known = state.num_tokens[rows].to(torch.int64)
    runs = verify_reference(
        token_ids=token_ids,
        is_accepted=is_accepted,
        is_bad=is_bad,
        logits_start=batch.logits_start,
        max_emitted=(state.token_limit[rows] - known).clamp(min=0),
        max_drafts=batch.max_drafts,
    )
    write_tokens_reference(state.token_history, rows, known, runs.token_ids, runs.num_emitted)
    state.num_tokens[rows] = (known + runs.num_emitted).to(torch.int32)
    computed = batch.starts + torch.where(batch.is_prefill, batch.query_lens, runs.num_emitted)
    state.num_computed_tokens[rows] = computed.to(torch.int32)
    state.num_drafts[rows] = 0
    return runs, torch.where(batch.is_prefill, 0, batch.query_lens - runs.num_emitted)


def verify_reference(
    *,
    token_ids: torch.Tensor,
    is_accepted: torch.Tensor,
    is_bad: torch.Tensor,
    logits_start: torch.Tensor,
    max_emitted: torch.Tensor,
    max_drafts: int,
) -> Verification:
    """The runs alone. max_emitted: [num_reqs] int64, room for each."""
    num_reqs, num_logits = len(logits_start) - 1, len(token_ids)
    if num_logits == 0:
        nothing = torch.zeros_like(logits_start[:-1])
        no_tokens = token_ids.new_full((num_reqs, max_drafts + 1), -1)
        return Verification(no_tokens, nothing, nothing, nothing.bool())
    steps = torch.arange(max_drafts + 1, device=token_ids.device)
    first, end = logits_start[:-1, None], logits_start[1:, None]
    index = (first + steps).clamp(max=num_logits - 1)
    has_logits = (end > first)[:, 0]
    # A request's last row accepts nothing, so rows of the next one never count; without rows of its own, none do.
    num_accepted = is_accepted[index[:, :-1]].cumprod(dim=1).sum(dim=1) * has_logits
    num_emitted = torch.minimum(num_accepted + 1, max_emitted) * has_logits
    emitted = steps < num_emitted[:, None]
    return Verification(
        token_ids=torch.where(emitted, token_ids[index], -1),
        num_emitted=num_emitted,
        num_accepted=num_accepted,
        is_bad=(is_bad[index] & emitted).any(dim=1),
    )


def write_tokens_reference(
    token_history: torch.Tensor,
    rows: torch.Tensor,
    first: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """token_history[row, first + j] = token_ids[:, j] for j < counts; the rest of the history stays.

    rows, first, counts: [n] int64, rows distinct; token_ids: [n, width] int64.
    """
    offsets = torch.arange(token_ids.shape[1], device=token_ids.device)
    # What is masked is written back to where it was; beyond the end that is the last column, which no valid token ever
    # uses (capacity is one more than the longest history with drafts).
    positions = (first[:, None] + offsets).clamp(max=token_history.shape[1] - 1)
    index = rows[:, None].expand_as(positions)
    old = token_history[index, positions]
    mask = offsets < counts[:, None]
    token_history[index, positions] = torch.where(mask, token_ids.to(torch.int32), old)


@jit(do_not_specialize=["max_drafts"])
def _emit_runs_kernel(
    token_ids_ptr,
    is_accepted_ptr,
    is_bad_ptr,
    logits_start_ptr,
    rows_ptr,
    starts_ptr,
    query_lens_ptr,
    is_prefill_ptr,
    token_history_ptr,
    num_tokens_ptr,
    num_computed_tokens_ptr,
    num_drafts_ptr,
    token_limit_ptr,
    run_ptr,
    num_emitted_ptr,
    num_accepted_ptr,
    is_bad_run_ptr,
    num_rejected_ptr,
    history_stride,
    max_drafts,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    request = tl.program_id(0)
    steps = tl.arange(0, WIDTH)
    row = tl.load(rows_ptr + request)
    first = tl.load(logits_start_ptr + request)
    num_logits = tl.load(logits_start_ptr + request + 1) - first
    start = tl.load(starts_ptr + request)
    query_len = tl.load(query_lens_ptr + request)
    is_prefill = tl.load(is_prefill_ptr + request) != 0
    known = tl.load(num_tokens_ptr + row).to(tl.int64)
    room = tl.maximum(tl.load(token_limit_ptr + row).to(tl.int64) - known, 0)

    may_accept = (steps < max_drafts) & (steps < num_logits)
    is_accepted = tl.load(is_accepted_ptr + first + steps, mask=may_accept, other=0).to(tl.int32) != 0
    num_accepted = tl.min(tl.where(is_accepted, WIDTH, steps), axis=0).to(tl.int64)
    num_emitted = tl.where(num_logits > 0, tl.minimum(num_accepted + 1, room), 0)
    is_emitted = steps < num_emitted
    run = tl.load(token_ids_ptr + first + steps, mask=is_emitted, other=-1)
    is_bad = tl.load(is_bad_ptr + first + steps, mask=is_emitted, other=0).to(tl.int32)

    tl.store(run_ptr + request * (max_drafts + 1) + steps, run, mask=steps <= max_drafts)
    tl.store(num_emitted_ptr + request, num_emitted)
    tl.store(num_accepted_ptr + request, num_accepted)
    tl.store(is_bad_run_ptr + request, tl.max(is_bad, axis=0) != 0)
    tl.store(num_rejected_ptr + request, tl.where(is_prefill, 0, query_len - num_emitted))

    history = token_history_ptr + row * history_stride + known + steps
    tl.store(history, run.to(tl.int32), mask=is_emitted)
    tl.store(num_tokens_ptr + row, (known + num_emitted).to(tl.int32))
    computed = start + tl.where(is_prefill, query_len, num_emitted)
    tl.store(num_computed_tokens_ptr + row, computed.to(tl.int32))
    tl.store(num_drafts_ptr + row, 0)


def emit_runs_triton(
    token_ids: torch.Tensor,
    is_accepted: torch.Tensor,
    is_bad: torch.Tensor,
    batch: VerifiedBatch,
    state: RowState,
) -> tuple[Verification, torch.Tensor]:
    rows, max_drafts, num_reqs = batch.rows, batch.max_drafts, len(batch.rows)
    num_rejected = rows.new_empty(num_reqs)
    runs = Verification(
        token_ids=rows.new_empty(num_reqs, max_drafts + 1),
        num_emitted=rows.new_empty(num_reqs),
        num_accepted=rows.new_empty(num_reqs),
        is_bad=rows.new_empty(num_reqs, dtype=torch.bool),
    )
    _emit_runs_kernel[(num_reqs,)](
        token_ids,
        is_accepted,
        is_bad,
        batch.logits_start,
        rows,
        batch.starts,
        batch.query_lens,
        batch.is_prefill,
        state.token_history,
        state.num_tokens,
        state.num_computed_tokens,
        state.num_drafts,
        state.token_limit,
        runs.token_ids,
        runs.num_emitted,
        runs.num_accepted,
        runs.is_bad,
        num_rejected,
        state.token_history.stride(0),
        max_drafts,
        WIDTH=draft_width(max_drafts + 1),
        num_warps=1,
        **launch_options(rows.device),
    )
    return runs, num_rejected
