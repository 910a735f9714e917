"""Acceptance at given rates, whatever the target says: how fast an engine would be with a better or worse drafter.

The emitted text is the drafter's as far as drafts are accepted, so this is for benchmarks only; the configuration
refuses it unless it is allowed, and the server says that it is on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.keyed_noise import ACCEPT_STREAM, keyed_uniform_reference
from engine.sampling.sampler import SampleBatch, Sampler
from engine.sampling.verification_rule import RuledTokens, VerificationRule
from engine.sampling.verified_drafts import VerifiedDrafts


class SyntheticRule(VerificationRule):
    """`rates`: probability that draft i is accepted given that all before it were; one per possible draft."""

    def __init__(self, rates: Sequence[float], device: torch.device) -> None:
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)  # [max_drafts]
        self._sampler = Sampler()

    def apply(self, logits: torch.Tensor, batch: SampleBatch, drafts: VerifiedDrafts) -> RuledTokens:
        sampled = self._sampler.sample(logits, batch)
        # A request's last row is one step beyond its drafts; it has none, whatever rate is read for it.
        rates = self._rates[drafts.steps.clamp(max=len(self._rates) - 1)]
        u = keyed_uniform_reference(batch.states.seeds[batch.rows], batch.positions, ACCEPT_STREAM)
        is_accepted = drafts.is_draft & (u < rates)
        token_ids = torch.where(is_accepted, drafts.token_ids, sampled.token_ids)
        return RuledTokens(token_ids, is_accepted, sampled.is_bad)
