"""Prompt lookup: the continuation of the longest earlier occurrence of a sequence's own tail.

For a row with T known tokens h[0..T-1], the match at p (p <= T - 2) is the largest n <= max_n with
h[p - j] == h[T - 1 - j] for all j < n. The row takes the p with the largest n >= min_n, the latest of equals, and
proposes h[p + 1], h[p + 2], ...; what would lie behind the known tokens is continued with the period T - 1 - p, as if
the repetition went on. Example, max_n 3, h = [1, 2, 3, 9, 1, 2, 3]: p = 2 with n = 3, proposals 9, 1, 2, 3, 9, ...

Shapes: history [num_rows, capacity] int32; rows, num_tokens [num_reqs] int64; result token_ids [num_reqs, k] int64
(-1 where no match) and found [num_reqs] bool. `max_len` bounds num_tokens from above on the host. No host sync.
"""

from __future__ import annotations

import torch


def ngram_lookup_reference(
    history: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    max_len: int,
    k: int,
    min_n: int,
    max_n: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module docstring."""
    tokens = history[rows, :max_len]
    positions = torch.arange(max_len, device=history.device)
    last = num_tokens - 1
    run = torch.ones_like(tokens, dtype=torch.bool)
    length = torch.zeros_like(tokens, dtype=torch.int64)
    for offset in range(max_n):
        tail = tokens.gather(1, (last - offset).clamp(min=0)[:, None])
        shifted = tokens.roll(offset, dims=1)
        run &= (shifted == tail) & (positions >= offset) & (last >= offset)[:, None]
        length += run
    length = torch.where(positions < last[:, None], length, 0)
    # One key orders by length, then by position; lengths are at most max_n.
    best = (length * max_len + positions).argmax(dim=1)
    found = length.gather(1, best[:, None])[:, 0] >= min_n
    period = (last - best).clamp(min=1)
    steps = torch.arange(k, device=history.device)
    source = (best[:, None] + 1 + steps % period[:, None]).clamp(max=max_len - 1)
    drafts = tokens.gather(1, source).to(torch.int64)
    return torch.where(found[:, None], drafts, -1), found
