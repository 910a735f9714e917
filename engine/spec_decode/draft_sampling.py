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

    def draw(self, logits: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor) -> torch.Tensor:
        """logits: [num_reqs, vocab_size] float; positions: [num_reqs] int64, of the drafts. Returns [num_reqs] int64;
        -1 where the logits are unusable, which ends the request's drafts of this step."""
        distributions = inputs.draft_distributions
        sampled = self._sampler.sample(
            logits,
            SampleBatch(
                rows=inputs.rows,
                positions=positions,
                request_rows=inputs.request_rows,
                states=inputs.states,
                features=inputs.states.features(inputs.row_list),
            ),
            stream=TARGET_STREAM if distributions is None else DRAFT_STREAM,
            needs_probs=distributions is not None,
        )
        if distributions is not None:
            assert sampled.probs is not None
            steps = positions - inputs.request_rows.num_tokens[inputs.rows]
            distributions.record(inputs.rows, steps, sampled.probs)
        return torch.where(sampled.is_bad, -1, sampled.token_ids)
