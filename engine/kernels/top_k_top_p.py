"""The tokens that top_k and top_p leave of each row, most likely first.

top_k keeps the first top_k tokens in the order (logit descending, id ascending); 0 keeps all. top_p then
works on the distribution renormalised over these: it keeps the shortest prefix whose probability reaches
top_p, the token that crosses the threshold included (Holtzman et al. 2020); 1 keeps all. At least one token
stays.
Example, probabilities [0.5, 0.3, 0.1, 0.1]: top_p 0.6 keeps 2; top_k 2 and top_p 0.6 keep 1: 0.5 / 0.8 > 0.6.

Shapes: logits [n, vocab] float; top_k [n] int64; top_p [n] of the dtype of logits. `num_candidates` bounds on
the host how many tokens a row can keep. Result: logits [n, w], -inf behind the kept ones; ids [n, w] int64.
Probabilities are summed in order, so a row's result depends neither on w nor on other rows. Accumulation is
that of torch.cumsum (double for float32 on CPU).
"""

from __future__ import annotations

import torch

from engine.kernels.select_largest import select_largest_reference

PARTIAL_WIDTH = 1024  # tokens; they hold the kept ones nearly always and cost far less than sorting a row


def top_k_top_p_reference(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Look at the `width` largest logits of each row.

    Returns (logits, ids) as above, and is_complete [n] bool: False where the row may keep more than these.
    """
    vocab_size = logits.shape[-1]
    limit = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    values, token_ids = select_largest_reference(logits, width)
    ranks = torch.arange(width, device=logits.device)
    probs = logits.softmax(dim=-1).gather(1, token_ids).masked_fill_(ranks >= limit[:, None], 0.0)
    mass = probs.cumsum_(dim=-1)
    total = torch.where(limit < vocab_size, mass[:, -1], 1.0)
    crossing = (mass < (top_p * total)[:, None]).sum(dim=-1) + 1
    num_kept = torch.where(top_p < 1.0, torch.minimum(crossing, limit), limit)
    is_complete = torch.where(limit < vocab_size, limit, num_kept) <= width
    return values.masked_fill_(ranks >= num_kept[:, None], float("-inf")), token_ids, is_complete


def top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module docstring. Where reading a flag is free, rows are sorted only if they must be."""
    if num_candidates > PARTIAL_WIDTH and not logits.is_cuda:
        values, token_ids, is_complete = top_k_top_p_reference(logits, top_k, top_p, PARTIAL_WIDTH)
        if is_complete.all():  # sync: host memory
            return values, token_ids
    values, token_ids, _ = top_k_top_p_reference(logits, top_k, top_p, num_candidates)
    return values, token_ids
