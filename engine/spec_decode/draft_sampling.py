"""Draws drafts exactly as the target draws tokens: the same processors, the same keyed noise at the same position.

When the draft distribution is close to the target's, the same noise makes both draw the same token; for greedy
requests it is the plain argmax. A rule that needs independent drafts and their distributions gets both.
"""

from __future__ import annotations

import torch

from engine.kernels.keyed_noise import DRAFT_STREAM, TARGET_STREAM
from engine.sampling.sampler import SampleBatch, Sampler
from engine.spec_decode.speculator import ProposalInputs


class DraftSampler:
    """Stateless. Before the draft at position p stand the tokens history[:p], earlier drafts included."""

    def __init__(self) -> None:
        self._sampler = Sampler()

    def takes_largest(self, inputs: ProposalInputs) -> bool:
        """Is each draft the token with the largest logit, of equal logits the lowest id?"""
        features = inputs.features
        is_plain = not features.changes_logits and inputs.draft_distributions is None
        return features.kind == "greedy" and is_plain

    def draw(self, logits: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor) -> torch.Tensor:
        """logits: [num_reqs, vocab_size] float; positions: [num_reqs] int64, of the drafts. Returns [num_reqs] int64;
        -1 where the logits are unusable, which ends the request's drafts of this step."""
        distributions = inputs.draft_distributions
        sampled = self._sampler.sample(
            logits,
            _sample_batch(inputs, positions),
            stream=TARGET_STREAM if distributions is None else DRAFT_STREAM,
            needs_probs=distributions is not None,
            bad_id=-1,
        )
        if distributions is not None:
            assert sampled.probs is not None
            steps = positions - inputs.request_rows.num_tokens[inputs.rows]
            is_wanted = steps < inputs.num_speculative_tokens
            distributions.record(inputs.rows, steps, sampled.probs, is_wanted)
        return sampled.token_ids

    def draw_among(
        self, logits: torch.Tensor, token_ids: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor
    ) -> torch.Tensor:
        """The same from a head that knows some tokens only. logits: [num_reqs, m] float; token_ids: [num_reqs, m]
        int64, distinct in a row. The whole vocabulary is built only for what is defined over it: biases, penalties,
        and the recorded distributions of a rule.
        """
        if inputs.features.changes_logits or inputs.draft_distributions is not None:
            spread = logits.new_full((len(logits), inputs.states.vocab_size), float("-inf"))
            return self.draw(spread.scatter_(1, token_ids, logits), inputs, positions)
        return self._sampler.sample_among(
            logits, token_ids, _sample_batch(inputs, positions), bad_id=-1
        ).token_ids


def _sample_batch(inputs: ProposalInputs, positions: torch.Tensor) -> SampleBatch:
    return SampleBatch(
        rows=inputs.rows,
        positions=positions,
        request_rows=inputs.request_rows,
        states=inputs.states,
        features=inputs.features,
    )
