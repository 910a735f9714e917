"""The layers of Gemma decoders and of the Gemma 4 drafter: norms before and after each branch, and what Gemma 4 adds.

A layer knows its own geometry (GemmaLayerConfig) and nothing of its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.kernels.attention_heads import HeadLayout
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import GemmaRMSNorm
from engine.layers.products import Activation
from engine.layers.rotary import Rotation
from engine.models.gemma4_experts import GemmaExperts
from engine.models.gemma_config import GemmaConfig, GemmaLayerConfig


class GemmaAttention(nn.Module):
    """Query and key heads are normed, then rotated; a Gemma 4 value is normed too, without a weight. A layer that reads
    the cache of another has queries only.
    """

    def __init__(
        self,
        config: GemmaConfig,
        layer: GemmaLayerConfig,
        cache_index: int,
        *,
        has_own_kv: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        head_size, eps = layer.head_size, config.rms_norm_eps
        query_size, kv_size = config.num_heads * head_size, layer.num_kv_heads * head_size
        parts = [("q_proj", query_size)]
        if has_own_kv:
            parts.append(("k_proj", kv_size))
            if layer.has_value_proj:
                parts.append(("v_proj", kv_size))
        self.qkv = Linear(config.hidden_size, parts, bias=False, dtype=dtype, device=device)
        output = [("o_proj", config.hidden_size)]
        self.output = Linear(query_size, output, bias=False, dtype=dtype, device=device)

        def norm() -> GemmaRMSNorm:
            return GemmaRMSNorm(head_size, eps, offset=config.norm_offset, dtype=dtype, device=device)

        self.query_norm = norm()
        self.key_norm = norm() if has_own_kv else None
        layout = HeadLayout(
            num_heads=config.num_heads,
            num_kv_heads=layer.num_kv_heads if has_own_kv else 0,
            has_value=layer.has_value_proj,
            query_norm=self.query_norm.of_heads,
            key_norm=None if self.key_norm is None else self.key_norm.of_heads,
            value_eps=eps if config.has_value_norm else None,
        )
        self.attention = Attention(cache_index, layout, head_size=head_size, scale=config.attention_scale)

    def attend(self, x: torch.Tensor, rotation: Rotation, context: AttentionContext) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns what `output` is applied to."""
        attended: torch.Tensor = self.attention(self.qkv(x), rotation, context)
        return attended

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.qkv.checkpoint_tensors(prefix)
        yield from self.output.checkpoint_tensors(prefix)
        yield from self.query_norm.checkpoint_tensors(f"{prefix}q_norm")
        if self.key_norm is not None:
            yield from self.key_norm.checkpoint_tensors(f"{prefix}k_norm")


class PerLayerInput(nn.Module):
    """(x + norm(projection(gelu(gate(x)) * input))) * scale: what a layer makes of its own embedding of the token."""

    def __init__(self, config: GemmaConfig, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        gate, projection = [("per_layer_input_gate", size)], [("per_layer_projection", hidden_size)]
        gelu = Activation("gelu_tanh", is_gated=False)
        self.gate = Linear(hidden_size, gate, bias=False, activation=gelu, dtype=dtype, device=device)
        self.projection = Linear(size, projection, bias=False, dtype=dtype, device=device)
        self.norm = GemmaRMSNorm(
            hidden_size, config.rms_norm_eps, offset=config.norm_offset, dtype=dtype, device=device
        )

    def forward(
        self,
        x: torch.Tensor,
        layer_input: torch.Tensor,
        scale: torch.Tensor | None,
        next_norm: GemmaRMSNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [num_tokens, hidden_size]; layer_input: [num_tokens, size]. Returns (x, next_norm(x)), shaped like x."""
        branch = self.projection(self.gate.activated(x, layer_input))
        return self.norm.add_normed(x, branch, scale=scale, next_norm=next_norm)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.gate.checkpoint_tensors(prefix)
        yield from self.projection.checkpoint_tensors(prefix)
        yield from self.norm.checkpoint_tensors(f"{prefix}post_per_layer_input_norm")


class GemmaDecoderLayer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); in Gemma 4 also experts beside the MLP, a per-layer
    input, and a factor for all that leaves the layer.
    """

    layer_scalar: nn.Parameter | None  # [1]

    def __init__(
        self,
        config: GemmaConfig,
        layer: GemmaLayerConfig,
        cache_index: int,
        *,
        has_own_kv: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        hidden_size = config.hidden_size

        def norm() -> GemmaRMSNorm:
            return GemmaRMSNorm(
                hidden_size, config.rms_norm_eps, offset=config.norm_offset, dtype=dtype, device=device
            )

        self.layer_type = layer.layer_type
        self.input_norm = norm()
        self.attention = GemmaAttention(
            config, layer, cache_index, has_own_kv=has_own_kv, dtype=dtype, device=device
        )
        self.post_attention_norm = norm()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(
            hidden_size,
            layer.intermediate_size,
            bias=False,
            activation="gelu_tanh",
            dtype=dtype,
            device=device,
        )
        self.post_mlp_norm = norm()
        self.experts = None if config.experts is None else GemmaExperts(config, dtype, device)
        self.per_layer_input = None
        if config.per_layer_input is not None:
            self.per_layer_input = PerLayerInput(config, config.per_layer_input.size, dtype, device)
        self.layer_scalar = None
        if config.has_layer_scalar:
            self.layer_scalar = nn.Parameter(torch.empty(1, dtype=dtype, device=device), requires_grad=False)

    def forward(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        rotation: Rotation,
        context: AttentionContext,
        *,
        layer_input: torch.Tensor | None = None,
        next_norm: GemmaRMSNorm | None = None,
        tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [num_tokens, hidden_size]; normed: input_norm(x); layer_input: [num_tokens, per-layer size], where the
        model has them. Returns (x, next_norm(x)) for the next layer, x twice without one: a norm costs nothing where
        the sum is made. `tokens`: the only ones that anything is computed of behind attention, and returned.
        """
        attended = self.attention.attend(normed, rotation, context)
        if tokens is not None:
            x, attended = x[tokens], attended[tokens]
            layer_input = None if layer_input is None else layer_input[tokens]
        branch = self.attention.output(attended)
        x, normed = self.post_attention_norm.add_normed(x, branch, next_norm=self.mlp_norm)
        branch = self.mlp(normed)
        if self.experts is not None:
            branch = self.experts(x, branch)
        if self.per_layer_input is None or layer_input is None:
            return self.post_mlp_norm.add_normed(x, branch, scale=self.layer_scalar, next_norm=next_norm)
        x, _ = self.post_mlp_norm.add_normed(x, branch)
        output: tuple[torch.Tensor, torch.Tensor] = self.per_layer_input(
            x, layer_input, self.layer_scalar, next_norm
        )
        return output

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.input_norm.checkpoint_tensors(f"{prefix}input_layernorm")
        yield from self.attention.checkpoint_tensors(f"{prefix}self_attn.")
        yield from self.post_attention_norm.checkpoint_tensors(f"{prefix}post_attention_layernorm")
        yield from self.mlp_norm.checkpoint_tensors(f"{prefix}pre_feedforward_layernorm")
        yield from self.mlp.checkpoint_tensors(f"{prefix}mlp.")
        yield from self.post_mlp_norm.checkpoint_tensors(f"{prefix}post_feedforward_layernorm")
        if self.experts is not None:
            yield from self.experts.checkpoint_tensors(prefix)
        if self.per_layer_input is not None:
            yield from self.per_layer_input.checkpoint_tensors(prefix)
        if self.layer_scalar is not None:
            yield f"{prefix}layer_scalar", self.layer_scalar
