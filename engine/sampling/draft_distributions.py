"""What sampling drafters drew their drafts from, kept in the request rows until the drafts are verified.

Only the ratio rule needs it. It is written where a draft is drawn (spec_decode/draft_sampling.py), so that it is
what was sampled and nothing like it: after temperature, top_k and top_p, in the dtype of the draw. A draft without
an entry came from a drafter that does not sample: its distribution is one-hot.
"""

from __future__ import annotations

import torch


class DraftDistributions:
    """Costs rows * drafts * vocabulary * 4 or 8 bytes of device memory."""

    def __init__(
        self, max_num_rows: int, max_drafts: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._probs = torch.zeros(max_num_rows, max_drafts, vocab_size, dtype=dtype, device=device)
        self._is_sampled = torch.zeros(max_num_rows, max_drafts, dtype=torch.bool, device=device)

    def clear(self, rows: torch.Tensor) -> None:
        """Forget those of these rows, [n] int64, before drafts are made for them, here or on the host."""
        self._is_sampled.index_fill_(0, rows, 0)  # an assignment would copy a value from the host

    def record(
        self, rows: torch.Tensor, steps: torch.Tensor, probs: torch.Tensor, is_wanted: torch.Tensor
    ) -> None:
        """Draft `steps` of `rows`, both [n] int64, was drawn from probs [n, vocab_size]. is_wanted [n] bool: others are
        made by the way, and what is verified in their place may come from elsewhere. Steps that are none, of passes
        that only compile, go anywhere."""
        steps = steps.clamp(0, self._probs.shape[1] - 1)
        self._probs[rows, steps] = probs.to(self._probs.dtype)
        self._is_sampled[rows, steps] = is_wanted

    def take(self, rows: torch.Tensor, steps: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size]: what draft `steps` of `rows` was drawn from. rows, steps, token_ids (the drafts
        themselves, >= 0) [n] int64; steps beyond the last give anything."""
        steps = steps.clamp(max=self._probs.shape[1] - 1)
        probs = self._probs[rows, steps]
        one_hot = torch.zeros_like(probs).scatter_(1, token_ids[:, None], 1.0)
        return torch.where(self._is_sampled[rows, steps][:, None], probs, one_hot)
