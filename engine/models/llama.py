"""The Llama decoder (Touvron et al. 2023, arXiv:2302.13971), and by its config's flags that of its relatives.

Pre-normalised blocks, grouped-query attention with rotary positions, a gated MLP. A relative with other
flags is a subclass that overrides `read_config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.kernels.attention_heads import HeadLayout
from engine.kv_spec import KVGroupSpec
from engine.layers.attention import Attention
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.layers.unnormed import Rows, normed
from engine.models.base import CausalLM
from engine.models.decoder_config import DecoderConfig
from engine.models.weights import load_strict


class SelfAttention(nn.Module):
    """Projections, a norm of each query and key head where there is one, rotary positions, attention."""

    def __init__(
        self, config: DecoderConfig, layer_index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        query_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        parts = [("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size)]
        self.qkv = Linear(config.hidden_size, parts, bias=config.has_qkv_bias, dtype=dtype, device=device)
        output = [("o_proj", config.hidden_size)]
        self.output = Linear(query_size, output, bias=config.has_output_bias, dtype=dtype, device=device)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if config.has_qk_norm:
            self.query_norm = RMSNorm(config.head_size, config.rms_norm_eps, dtype=dtype, device=device)
            self.key_norm = RMSNorm(config.head_size, config.rms_norm_eps, dtype=dtype, device=device)
        layout = HeadLayout(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            query_norm=None if self.query_norm is None else self.query_norm.of_heads,
            key_norm=None if self.key_norm is None else self.key_norm.of_heads,
        )
        self.attention = Attention(
            layer_index, layout, head_size=config.head_size, scale=config.head_size**-0.5
        )

    def attend(self, x: Rows, rotation: Rotation, context: AttentionContext) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns what `output` is applied to: [num_tokens, num_heads * head_size]."""
        attended: torch.Tensor = self.attention(self.qkv(x), rotation, context)
        return attended

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.qkv.checkpoint_tensors(prefix)
        yield from self.output.checkpoint_tensors(prefix)
        if self.query_norm is not None and self.key_norm is not None:
            yield from self.query_norm.checkpoint_tensors(f"{prefix}q_norm")
            yield from self.key_norm.checkpoint_tensors(f"{prefix}k_norm")


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: DecoderConfig, layer_index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.attention = SelfAttention(config, layer_index, dtype, device)
        self.mlp_norm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(
            hidden_size, config.intermediate_size, bias=config.has_mlp_bias, dtype=dtype, device=device
        )

    def forward(self, x: torch.Tensor, rotation: Rotation, context: AttentionContext) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; returns the same shape."""
        return self.after_attention(
            x, self.attention.attend(self.attention_norm.pending(x), rotation, context)
        )

    def after_attention_normed(
        self, residual: torch.Tensor, attended: torch.Tensor, next_norm: RMSNorm
    ) -> tuple[torch.Tensor, Rows]:
        """(The layer's output, the same behind `next_norm`). residual: [num_tokens, hidden_size]."""
        x, rows = self.mlp_norm.after(residual, self.attention.output, attended)
        return next_norm.after(x, self.mlp.down, self.mlp.activate(rows))

    def after_attention(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer. residual: [num_tokens, hidden_size]; returns the same shape."""
        x, rows = self.mlp_norm.after(residual, self.attention.output, attended)
        return self.mlp.add_to(x, rows)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.attention_norm.checkpoint_tensors(f"{prefix}input_layernorm")
        yield from self.attention.checkpoint_tensors(f"{prefix}self_attn.")
        yield from self.mlp_norm.checkpoint_tensors(f"{prefix}post_attention_layernorm")
        yield from self.mlp.checkpoint_tensors(f"{prefix}mlp.")


class LlamaForCausalLM(CausalLM):
    """Llama 1 to 3 and SmolLM2."""

    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.config = self.read_config(config)
        self.dtype = dtype
        self.vocab_size = self.config.vocab_size
        self.hidden_size = self.config.hidden_size
        self.max_position_embeddings = self.config.max_position_embeddings
        self.num_layers = self.config.num_layers
        self.embedding = TokenEmbedding(self.vocab_size, self.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(self.config.rope, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(self.config, index, dtype, device) for index in range(self.num_layers)
        )
        self.norm = RMSNorm(self.hidden_size, self.config.rms_norm_eps, dtype=dtype, device=device)
        self.head = self.embedding
        if not self.config.is_tied:
            self.head = TokenEmbedding(self.vocab_size, self.hidden_size, dtype=dtype, device=device)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Raises CheckpointError for what this model cannot compute."""
        return DecoderConfig.from_raw(raw)

    def kv_groups(self) -> list[KVGroupSpec]:
        return [llama_kv_group("full", self.config, self.dtype)]

    def embed(self, input_ids: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.embedding(input_ids, beside)
        return output

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        rotation = self.rotary(positions)
        layers = cast(Sequence[DecoderLayer], self.layers)
        norms = [*(layer.attention_norm for layer in layers), self.norm]
        rows: Rows = norms[0].pending(x)
        needed = attention.needed
        for index, layer in enumerate(layers):
            attention.observe(index, x)
            attended = layer.attention.attend(rows, rotation, attention)
            if needed is not None and index + 1 == self.num_layers:
                # Nobody reads what is made of other tokens behind the last keys and values.
                if not len(needed.tokens):
                    return x
                x, attended = x[needed.tokens], attended[needed.tokens]
            x, rows = layer.after_attention_normed(x, attended, norms[index + 1])
        output = normed(rows)
        return output if needed is None else needed.spread(output, len(input_ids))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.head.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if self.config.is_tied else {}
        load_strict(type(self).__name__, dict(self._checkpoint_tensors()), weights, tied)

    def _checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.embedding.checkpoint_tensors("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.checkpoint_tensors(f"model.layers.{index}.")
        yield from self.norm.checkpoint_tensors("model.norm")
        if not self.config.is_tied:
            yield from self.head.checkpoint_tensors("lm_head")


def llama_kv_group(name: str, config: DecoderConfig, dtype: torch.dtype) -> KVGroupSpec:
    """Of all layers of a model, or of a drafter, of this shape."""
    bytes_per_layer = 2 * config.num_kv_heads * config.head_size * dtype.itemsize
    return KVGroupSpec(
        name=name,
        layer_indices=tuple(range(config.num_layers)),
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        bytes_per_token=bytes_per_layer * config.num_layers,
    )
