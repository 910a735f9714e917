"""What a step leaves for the host in one tensor, so that one copy brings it there.

Columns: those named below, then the run, -1 beyond it.
Shapes: see `Verification`; num_drafts, num_next_drafts [num_reqs] int64, is_bad_draft [num_reqs] bool; result
[num_reqs, NUM_COUNTS + width of the runs] int64. Grid: one program a request.
"""

from __future__ import annotations

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.emit_runs import Verification
from engine.kernels.triton_support import draft_width, jit, tl

EMITTED = 0  # tokens of the run
DRAFTED = 1  # drafts verified
ACCEPTED = 2  # of these
NEXT_DRAFTS = 3  # made for the next step
BAD = 4  # 0 or 1, as `Verification.is_bad`
BAD_DRAFT = 5  # 0 or 1
NUM_COUNTS = 6

NextDrafts = tuple[torch.Tensor, torch.Tensor]
"""(num_next_drafts, is_bad_draft) of those made for the next step."""


def pack_results(
    verification: Verification, num_drafts: torch.Tensor, next_drafts: NextDrafts | None
) -> torch.Tensor:
    """See the module docstring. num_drafts: those verified; without `next_drafts` none were made."""
    operation = pack_results_triton if num_drafts.is_cuda else pack_results_reference
    return operation(verification, num_drafts, next_drafts)


def pack_results_reference(
    verification: Verification, num_drafts: torch.Tensor, next_drafts: NextDrafts | None
) -> torch.Tensor:
    if next_drafts is None:
        none = torch.zeros_like(num_drafts)
        next_drafts = none, none
    num_next_drafts, is_bad_draft = next_drafts
    counts = (
        verification.num_emitted,
        num_drafts,
        verification.num_accepted,
        num_next_drafts,
        verification.is_bad.to(torch.int64),
        is_bad_draft.to(torch.int64),
    )
    return torch.cat((torch.stack(counts, dim=1), verification.token_ids), dim=1)


@jit(do_not_specialize=["num_tokens"])
def _pack_results_kernel(
    num_emitted_ptr,
    num_drafts_ptr,
    num_accepted_ptr,
    num_next_drafts_ptr,
    is_bad_ptr,
    is_bad_draft_ptr,
    token_ids_ptr,
    results_ptr,
    num_tokens,
    HAS_NEXT: tl.constexpr,
    NUM_COUNTS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    request = tl.program_id(0)
    results = results_ptr + request * (NUM_COUNTS + num_tokens)
    tl.store(results, tl.load(num_emitted_ptr + request))
    tl.store(results + 1, tl.load(num_drafts_ptr + request))
    tl.store(results + 2, tl.load(num_accepted_ptr + request))
    tl.store(results + 4, tl.load(is_bad_ptr + request).to(tl.int64))
    if HAS_NEXT:
        tl.store(results + 3, tl.load(num_next_drafts_ptr + request))
        tl.store(results + 5, tl.load(is_bad_draft_ptr + request).to(tl.int64))
    else:
        tl.store(results + 3, tl.full([], 0, tl.int64))
        tl.store(results + 5, tl.full([], 0, tl.int64))
    steps = tl.arange(0, WIDTH)
    token_ids = tl.load(token_ids_ptr + request * num_tokens + steps, mask=steps < num_tokens)
    tl.store(results + NUM_COUNTS + steps, token_ids, mask=steps < num_tokens)


def pack_results_triton(
    verification: Verification, num_drafts: torch.Tensor, next_drafts: NextDrafts | None
) -> torch.Tensor:
    num_reqs, num_tokens = verification.token_ids.shape
    results = num_drafts.new_empty(num_reqs, NUM_COUNTS + num_tokens)
    num_next_drafts, is_bad_draft = next_drafts or (None, None)
    _pack_results_kernel[(num_reqs,)](
        verification.num_emitted,
        num_drafts,
        verification.num_accepted,
        num_next_drafts,
        verification.is_bad,
        is_bad_draft,
        verification.token_ids,
        results,
        num_tokens,
        HAS_NEXT=next_drafts is not None,
        NUM_COUNTS=NUM_COUNTS,
        WIDTH=draft_width(num_tokens),
        num_warps=1,
        **launch_options(num_drafts.device),
    )
    return results
