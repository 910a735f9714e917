"""The ratio test (Leviathan et al. 2022, arXiv:2211.17192, algorithm 1) in place of the default rule.

With p the target's processed distribution at a position and q what the draft d was drawn from:
    accept d if u < p(d) / q(d), else draw from max(p - q, 0), normalised; after the last draft draw from p.
The tokens are distributed as the plain sampler's, but are not the same tokens. That needs independent noise for d, u
and the token at a rejected draft: streams of their own. Keys are positions, so a later verification may meet noise
again that an earlier one had at hand; what had used it then stood behind a rejection, and nothing emitted depends
on it. Greedy rows are one-hot, so that the test compares tokens.
"""

from __future__ import annotations

import torch

from engine.kernels.keyed_noise import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    keyed_gumbel,
    keyed_uniform_reference,
)
from engine.sampling.draft_distributions import DraftDistributions
from engine.sampling.sampler import SampleBatch, Sampler
from engine.sampling.verification_rule import RuledTokens, VerificationRule
from engine.sampling.verified_drafts import VerifiedDrafts


class RatioRule(VerificationRule):
    """`draft_distributions`: the engine's; drafters that sample record there."""

    def __init__(self, draft_distributions: DraftDistributions) -> None:
        self.draft_distributions: DraftDistributions = draft_distributions
        self._sampler = Sampler()

    def apply(self, logits: torch.Tensor, batch: SampleBatch, drafts: VerifiedDrafts) -> RuledTokens:
        sampled = self._sampler.sample(logits, batch, needs_probs=True)
        assert sampled.probs is not None
        seeds, is_draft = batch.states.seeds[batch.rows], drafts.is_draft
        draft_ids = drafts.token_ids.clamp(min=0)
        p = sampled.probs
        q = self.draft_distributions.take(batch.rows, drafts.steps, draft_ids)
        u = keyed_uniform_reference(seeds, batch.positions, ACCEPT_STREAM)
        is_accepted = is_draft & (u * _at(q, draft_ids) < _at(p, draft_ids))
        recovered = _draw_residual(p, q, seeds, batch.positions)
        token_ids = torch.where(is_draft, torch.where(is_accepted, draft_ids, recovered), sampled.token_ids)
        return RuledTokens(token_ids.masked_fill(sampled.is_bad, 0), is_accepted, sampled.is_bad)


def _draw_residual(
    p: torch.Tensor, q: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """p, q [n, vocab_size]; seeds, positions [n] int64 -> [n] int64, drawn from max(p - q, 0)."""
    residual = (p - q).clamp(min=0)
    # Without a residual the draft is rejected with a probability of rounding only; p is as good then.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)
    token_ids = torch.arange(p.shape[1], device=p.device)
    noise = keyed_gumbel(seeds, positions, token_ids, RESIDUAL_STREAM)
    return (residual.log() + noise).argmax(dim=-1)


def _at(probs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """[n, vocab_size], [n] int64 -> [n]."""
    return probs.gather(1, token_ids[:, None])[:, 0]
