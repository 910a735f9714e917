"""Which drafts a step verifies, and the run of tokens that it emits for each request.

A run is the request's leading accepted drafts and the token after them. Who accepts, and which token stands at each
logits row, is the verification rule's matter (verification_rule.py). This file knows neither logits nor who drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class VerifiedDrafts:
    """The drafts of a step, at the logits row that decides about each: the row before the one where it was fed.

    Example, three requests, logits_start [0, 3, 3, 5], num_drafts [2, 0, 0] (the last one planned one, got none):
        logits row   0   1   2  |  3   4
        fed          9   5   6  |  8   7
        token_ids    5   6  -1  | -1  -1
        steps        0   1   2  |  0   1
    """

    token_ids: torch.Tensor  # [num_logits] int64; -1 where there is no draft
    steps: torch.Tensor  # [num_logits] int64; index of the logits row within its request

    @property
    def is_draft(self) -> torch.Tensor:
        """[num_logits] bool"""
        return self.token_ids >= 0


@dataclass(frozen=True)
class Verification:
    """In batch order."""

    token_ids: torch.Tensor  # [num_reqs, max_drafts + 1] int64; the emitted run, -1 beyond it
    num_emitted: torch.Tensor  # [num_reqs] int64; accepted drafts + 1, within max_emitted; 0: did not sample
    num_accepted: torch.Tensor  # [num_reqs] int64; accepted drafts, whether or not the run had room for them
    is_bad: torch.Tensor  # [num_reqs] bool; a token of the emitted run came from unusable logits


def locate_drafts(
    input_ids: torch.Tensor, logits_reqs: torch.Tensor, logits_start: torch.Tensor, num_drafts: torch.Tensor
) -> VerifiedDrafts:
    """input_ids [num_logits] int64: the token fed at each logits row; logits_reqs [num_logits] int64: its request in
    the batch; logits_start [num_reqs + 1] int64: the first row of each; num_drafts [num_reqs] int64: valid drafts, at
    most the request's logits rows - 1."""
    steps = torch.arange(len(input_ids), device=input_ids.device) - logits_start[logits_reqs]
    fed_next = F.pad(input_ids[1:], (0, 1), value=-1)[: len(input_ids)]
    return VerifiedDrafts(torch.where(steps < num_drafts[logits_reqs], fed_next, -1), steps)


def verify(
    *,
    token_ids: torch.Tensor,
    is_bad: torch.Tensor,
    is_accepted: torch.Tensor,
    logits_start: torch.Tensor,
    max_emitted: torch.Tensor,
    max_drafts: int,
) -> Verification:
    """Emit the leading accepted drafts of each request, then the token of the row after them.

    token_ids [num_logits] int64: the token of each logits row; where a draft is accepted, the draft itself.
    is_bad [num_logits] bool. is_accepted [num_logits] bool: False where there is no draft, as in the last row of a
    request. logits_start [num_reqs + 1] int64; a request without logits rows does not sample. max_emitted [num_reqs]:
    room for the run.

    Example, three requests, max_drafts 2, logits_start [0, 3, 3, 5]:
        logits row   0   1   2  |  3   4
        drafts       5   6  -1  |  7  -1
        token_ids    5   4   2  |  7   3
        is_accepted  x          |  x
    Request 0 emits [5, 4], request 1 nothing, request 2 emits [7, 3].
    """
    num_reqs, num_logits = len(logits_start) - 1, len(token_ids)
    steps = torch.arange(max_drafts + 1, device=token_ids.device)
    first, end = logits_start[:-1, None], logits_start[1:, None]
    if num_logits == 0:
        nothing = torch.zeros_like(logits_start[:-1])
        no_tokens = token_ids.new_full((num_reqs, max_drafts + 1), -1)
        return Verification(no_tokens, nothing, nothing, nothing.bool())
    index = (first + steps).clamp(max=num_logits - 1)
    has_logits = (end > first)[:, 0]
    # A request's last row accepts nothing, so rows of the next one never count; without rows of its own, none do.
    num_accepted = is_accepted[index[:, :-1]].cumprod(dim=1).sum(dim=1) * has_logits
    num_emitted = torch.minimum(num_accepted + 1, max_emitted.to(torch.int64)) * has_logits
    emitted = steps < num_emitted[:, None]
    return Verification(
        token_ids=torch.where(emitted, token_ids[index], -1),
        num_emitted=num_emitted,
        num_accepted=num_accepted,
        is_bad=(is_bad[index] & emitted).any(dim=1),
    )
