"""How many drafts a request can use: as many as it wants, and as its verification has room for beside a token of the
target's own. 0 for a request that has not emitted a token yet.

usable = min(num_wanted, max(token_limit - num_tokens - 1, 0)) if num_sampled > 0 else 0.
Shapes: num_wanted, num_sampled, rows [num_reqs] int64; see `RowState`; result [num_reqs] int64. Grid: one program a
request.
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.row_state import RowState
from engine.kernels.triton_support import jit, tl


def usable_drafts(
    num_wanted: torch.Tensor, num_sampled: torch.Tensor, rows: torch.Tensor, state: RowState
) -> torch.Tensor:
    """See the module docstring."""
    operation = usable_drafts_triton if rows.is_cuda else usable_drafts_reference
    return operation(num_wanted, num_sampled, rows, state)


def usable_drafts_reference(
    num_wanted: torch.Tensor, num_sampled: torch.Tensor, rows: torch.Tensor, state: RowState
) -> torch.Tensor:
    room = state.token_limit[rows] - state.num_tokens[rows] - 1
    return torch.where(num_sampled > 0, torch.minimum(num_wanted, room.clamp(min=0)), 0)


@jit
def _usable_drafts_kernel(
    num_wanted_ptr,
    num_sampled_ptr,
    rows_ptr,
    token_limit_ptr,
    num_tokens_ptr,
    usable_ptr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request)
    num_wanted = tl.load(num_wanted_ptr + request)
    has_sampled = tl.load(num_sampled_ptr + request) > 0
    room = tl.load(token_limit_ptr + row) - tl.load(num_tokens_ptr + row) - 1
    usable = tl.minimum(num_wanted, tl.maximum(room, 0).to(tl.int64))
    tl.store(usable_ptr + request, tl.where(has_sampled, usable, 0))


def usable_drafts_triton(
    num_wanted: torch.Tensor, num_sampled: torch.Tensor, rows: torch.Tensor, state: RowState
) -> torch.Tensor:
    usable = rows.new_empty(len(rows))
    _usable_drafts_kernel[(len(rows),)](
        num_wanted,
        num_sampled,
        rows,
        state.token_limit,
        state.num_tokens,
        usable,
        num_warps=1,
        **launch_options(rows.device),
    )
    return usable
