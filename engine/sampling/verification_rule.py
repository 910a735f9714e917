"""The rules of verification: which token stands at each logits row of a step, and which drafts are accepted.

`CoupledRule`, the default, keeps the path: the emitted tokens are the plain sampler's, whatever was drafted. The
other rules are options with files of their own; the runner knows only the interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from engine.sampling.draft_distributions import DraftDistributions
from engine.sampling.sampler import SampleBatch, Sampler
from engine.sampling.verified_drafts import VerifiedDrafts


@dataclass(frozen=True)
class RuledTokens:
    """By logits row, as `verify` reads them."""

    token_ids: torch.Tensor  # [n] int64; the draft where it is accepted
    is_accepted: torch.Tensor  # [n] bool; False where there is no draft
    is_bad: torch.Tensor  # [n] bool; as in SampleResult


class VerificationRule(ABC):
    """One per engine."""

    draft_distributions: DraftDistributions | None = None
    """Where drafters that sample leave what they drew from. None: the rule does not ask."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, batch: SampleBatch, drafts: VerifiedDrafts) -> RuledTokens:
        """logits: [n, vocab_size] float32 or float64, of the target; not changed. No host sync."""


class CoupledRule(VerificationRule):
    """Accept a draft while it equals the token that the plain sampler draws there, with its own keyed noise."""

    def __init__(self) -> None:
        self._sampler = Sampler()

    def apply(self, logits: torch.Tensor, batch: SampleBatch, drafts: VerifiedDrafts) -> RuledTokens:
        sampled = self._sampler.sample(logits, batch)
        return RuledTokens(sampled.token_ids, sampled.token_ids == drafts.token_ids, sampled.is_bad)
