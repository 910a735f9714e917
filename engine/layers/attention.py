"""A layer's door to the paged KV cache: heads and scale. How to compute attention, the backend knows.

`layer_index` names the cache: a layer without K and V of its own gives the index of the layer that it reads.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.kernels.attention_heads import HeadLayout
from engine.layers.rotary import Rotation


class Attention(nn.Module):
    """softmax(q k^T * scale) v over everything the request has cached, its own new tokens included."""

    def __init__(self, layer_index: int, layout: HeadLayout, *, head_size: int, scale: float) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.layout = layout
        self.head_size = head_size
        self.scale = scale

    def forward(self, projected: torch.Tensor, rotation: Rotation, context: AttentionContext) -> torch.Tensor:
        """projected: [num_tokens, heads * head_size], heads as the layout says: neither normed nor rotated. Returns
        [num_tokens, num_heads * head_size].
        """
        heads = projected.view(len(projected), -1, self.head_size)
        return context.attend_heads(self.layer_index, heads, self.layout, rotation, self.scale).flatten(1)
