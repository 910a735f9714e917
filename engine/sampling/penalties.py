"""Repetition, presence and frequency penalties, counted from the token history.

There are no counters to keep in step with acceptance: the tokens before a drawn position p are history[:p],
drafts of earlier positions of the same run included. If such a draft is rejected, the draws behind it are
thrown away anyway.
"""

from __future__ import annotations

import torch


def apply_penalties_(
    logits: torch.Tensor,
    history: torch.Tensor,
    positions: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """In place, in this order: repetition (Keskar et al. 2019, for prompt and output: positive logits are
    divided, others multiplied), then frequency * count and presence for tokens of the output.

    logits [m, vocab] float; history [m, capacity] int32, of each row's request; positions [m] int64, of the
    token to draw; num_prompt_tokens [m] int32; repetition, presence, frequency [m] of the dtype of logits.
    Ids outside the vocabulary (drafts that will be rejected) count for nothing.
    """
    vocab_size = logits.shape[-1]
    columns = torch.arange(history.shape[1], device=history.device)
    before = (columns < positions[:, None]) & (history >= 0) & (history < vocab_size)
    in_output = before & (columns >= num_prompt_tokens[:, None])
    token_ids = history.clamp(0, vocab_size - 1).to(torch.int64)

    def count(mask: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits).scatter_add_(1, token_ids, mask.to(logits.dtype))

    factor = repetition[:, None]
    penalized = torch.where(logits > 0, logits / factor, logits * factor)
    logits.copy_(torch.where(count(before) > 0, penalized, logits))
    output_counts = count(in_output)
    logits.sub_(output_counts * frequency[:, None])
    logits.sub_((output_counts > 0) * presence[:, None])
