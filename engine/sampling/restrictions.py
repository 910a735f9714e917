"""What changes logits before the penalties: allowed ids, bad words, minimum length, biases. Every function
works in place on the logits of rows that use it and treats each row, so each draft position, by itself.
"""

from __future__ import annotations

import torch

from engine.params import MAX_BAD_WORD_TOKENS


def apply_allowed_ids_(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """logits [m, vocab] float; allowed [m, vocab] bool."""
    logits.masked_fill_(~allowed, float("-inf"))


def apply_bias_(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    output_indices: torch.Tensor,
) -> None:
    """Add values to the logits of token_ids while the output index is below `ends` (min_tokens: the token at
    output index i is masked for i < min_tokens, so index min_tokens is the first that may end the request).

    logits [m, vocab] float; token_ids, ends [m, width] int64; values [m, width] float; output_indices [m]
    int64. Ids may repeat within a row: their values add up.
    """
    active = output_indices[:, None] < ends
    logits.scatter_add_(1, token_ids, torch.where(active, values, 0.0).to(logits.dtype))


def apply_bad_words_(
    logits: torch.Tensor,
    words: torch.Tensor,
    token_history: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Mask the last token of each word whose other tokens are the last ones before the drawn position, in the
    prompt or the output.

    logits [m, vocab] float; words [m, num_words, MAX_BAD_WORD_TOKENS] int64, aligned to the right, -1 before
    the word; token_history [num_rows, capacity] int32; rows, positions [m] int64.
    Example with words of at most 3 tokens, word [-1, 4, 5], position 9: 5 is masked if the token at 8 is 4.
    """
    offsets = torch.arange(1 - MAX_BAD_WORD_TOKENS, 0, device=logits.device)
    columns = positions[:, None] + offsets
    history = token_history[rows[:, None], columns.clamp(min=0)]
    history = torch.where(columns >= 0, history, -2)  # before the beginning: equal to nothing
    prefixes, last = words[..., :-1], words[..., -1]
    completes = ((prefixes == -1) | (prefixes == history[:, None])).all(dim=-1) & (last >= 0)
    penalty = torch.where(completes, float("-inf"), 0.0).to(logits.dtype)
    logits.scatter_add_(1, last.clamp(min=0), penalty)
