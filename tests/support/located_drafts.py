"""The drafts of a step by its definition: from the tokens that it was fed, instead of from the rows' history."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.sampling.verified_drafts import VerifiedDrafts


def locate_drafts(
    input_ids: torch.Tensor, logits_reqs: torch.Tensor, logits_start: torch.Tensor, num_drafts: torch.Tensor
) -> VerifiedDrafts:
    """input_ids [num_logits] int64: the token fed at each logits row; logits_reqs [num_logits] int64: its request in
    the batch; logits_start [num_reqs + 1] int64: the first row of each; num_drafts [num_reqs] int64: valid drafts, at
    most the request's logits rows - 1."""
    steps = torch.arange(len(input_ids), device=input_ids.device) - logits_start[logits_reqs]
    fed_next = F.pad(input_ids[1:], (0, 1), value=-1)[: len(input_ids)]
    return VerifiedDrafts(torch.where(steps < num_drafts[logits_reqs], fed_next, -1), steps)
