"""A layer's door to the paged KV cache: heads and scale. How to compute attention, the backend knows.

`layer_index` names the cache: a layer without K and V of its own gives the index of the layer that it reads.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.attention.backend import AttentionContext


class Attention(nn.Module):
    """softmax(q k^T * scale) v over everything the request has cached, its own new tokens included."""

    def __init__(
        self, layer_index: int, *, num_heads: int, num_kv_heads: int, head_size: int, scale: float
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        context: AttentionContext,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_size]; key, value: [num_tokens, num_kv_heads, head_size], or None to read
        the cache of `layer_index` as it is. Returns [num_tokens, num_heads * head_size].
        """
        return context.attend(self.layer_index, query, key, value, self.scale).flatten(1)
