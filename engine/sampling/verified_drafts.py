"""The drafts of a step, as a verification rule sees them.

Who accepts, and which token stands at each logits row, is the rule's matter (verification_rule.py); which run of tokens
follows from it, that of engine/kernels/emit_runs.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
