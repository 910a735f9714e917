"""Token embeddings and the output head. A tied head is the embedding itself, the same object used twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.embed_tokens import embed_tokens
from engine.layers.exact_products import ExactProducts


class TokenEmbedding(nn.Module):
    """A table of [vocab_size, hidden_size]. Embeddings, not the head, are multiplied by `scale`, rounded to dtype."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float = 1.0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.exact: ExactProducts | None = None  # of the head; set where numerics are exact
        self.scale = torch.tensor(scale, dtype=dtype).item()  # sync: at start-up, host memory
        weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, token_ids: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size], and in the same rows those of `beside`, behind."""
        return embed_tokens(token_ids, self.weight, self.scale, beside)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size], both of dtype."""
        if self.exact is not None:
            return self.exact.linear(hidden_states, self.weight, None)
        return F.linear(hidden_states, self.weight)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}.weight", self.weight
