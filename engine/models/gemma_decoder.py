"""The decoder of Gemma 3 and 4: sliding and full layers in two KV groups, and layers that read another layer's cache.

Subclasses read their generation's config; what it holds decides what is computed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.kernels.layer_inputs import layer_inputs
from engine.kernels.softcap import softcap
from engine.kv_spec import KVGroupSpec
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.norm import GemmaRMSNorm
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.models.base import CausalLM
from engine.models.gemma_checkpoint import gemma_tensors
from engine.models.gemma_config import FULL, SLIDING, GemmaConfig, GemmaLayerConfig
from engine.models.gemma_layers import GemmaDecoderLayer
from engine.models.weights import load_strict

_GROUP_NAMES = {FULL: "full", SLIDING: "sliding"}


class PerLayerEmbedding(nn.Module):
    """For every layer an input of its own, from the token's id and from its embedding, mixed half and half."""

    def __init__(self, config: GemmaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert config.per_layer_input is not None
        num_layers, size = len(config.layers), config.per_layer_input.size
        vocab_size = config.per_layer_input.vocab_size
        self._context_scale = config.hidden_size**-0.5
        self.table = TokenEmbedding(
            vocab_size, num_layers * size, scale=math.sqrt(size), dtype=dtype, device=device
        )
        parts = [("per_layer_model_projection", num_layers * size)]
        self.projection = Linear(config.hidden_size, parts, bias=False, dtype=dtype, device=device)
        self.norm = GemmaRMSNorm(
            size, config.rms_norm_eps, offset=config.norm_offset, dtype=dtype, device=device
        )

    def forward(self, input_ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """input_ids: [num_tokens] int64; embeddings: [num_tokens, hidden_size], scaled. Returns [num_tokens,
        num_layers, size].
        """
        return layer_inputs(
            input_ids,
            self.projection(embeddings),
            self.table.weight,
            self.norm.weight,
            self.norm.form,
            context_scale=self._context_scale,
            table_scale=self.table.scale,
        )

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.table.checkpoint_tensors(f"{prefix}embed_tokens_per_layer")
        yield from self.projection.checkpoint_tensors(prefix)
        yield from self.norm.checkpoint_tensors(f"{prefix}per_layer_projection_norm")


class GemmaDecoder(CausalLM):
    """Head and embedding are one table; only the embedding is scaled."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.config = self.read_config(config)
        self.dtype = dtype
        self.vocab_size = self.config.vocab_size
        self.hidden_size = self.config.hidden_size
        self.max_position_embeddings = self.config.max_position_embeddings
        self.num_layers = len(self.config.layers)
        scale = math.sqrt(self.hidden_size)
        self.embedding = TokenEmbedding(
            self.vocab_size, self.hidden_size, scale=scale, dtype=dtype, device=device
        )
        self.per_layer_embedding = None
        if self.config.per_layer_input is not None:
            self.per_layer_embedding = PerLayerEmbedding(self.config, dtype, device)
        self.rotary = nn.ModuleDict(
            {
                kind: RotaryEmbedding(rope, dtype=dtype, device=device)
                for kind, rope in self.config.rope.items()
            }
        )
        self.layers = nn.ModuleList(
            self._make_layer(index, layer, dtype, device) for index, layer in enumerate(self.config.layers)
        )
        self.norm = GemmaRMSNorm(
            self.hidden_size,
            self.config.rms_norm_eps,
            offset=self.config.norm_offset,
            dtype=dtype,
            device=device,
        )

    @classmethod
    @abstractmethod
    def read_config(cls, raw: Mapping[str, Any]) -> GemmaConfig:
        """Raises CheckpointError for what this model cannot compute."""

    def _make_layer(
        self, index: int, layer: GemmaLayerConfig, dtype: torch.dtype, device: torch.device
    ) -> GemmaDecoderLayer:
        assert layer.kv_source is not None
        has_own_kv = layer.kv_source == index
        return GemmaDecoderLayer(
            self.config, layer, layer.kv_source, has_own_kv=has_own_kv, dtype=dtype, device=device
        )

    def kv_groups(self) -> list[KVGroupSpec]:
        """One group per layer type that occurs, full layers first. Layers that share KV own none."""
        groups = []
        for kind in (FULL, SLIDING):
            indices = [
                index
                for index, layer in enumerate(self.config.layers)
                if layer.layer_type == kind and layer.kv_source == index
            ]
            if indices:
                layer = self.config.layers[indices[0]]
                bytes_per_layer = 2 * layer.num_kv_heads * layer.head_size * self.dtype.itemsize
                groups.append(
                    KVGroupSpec(
                        name=_GROUP_NAMES[kind],
                        layer_indices=tuple(indices),
                        num_kv_heads=layer.num_kv_heads,
                        head_size=layer.head_size,
                        bytes_per_token=bytes_per_layer * len(indices),
                        window=self.config.window if kind == SLIDING else None,
                    )
                )
        return groups

    def shareable_kv(self) -> Mapping[str, int]:
        """The last layer of each type that has KV of its own."""
        own = {index: layer for index, layer in enumerate(self.config.layers) if layer.kv_source == index}
        return {layer.layer_type: index for index, layer in own.items()}

    def embed(self, input_ids: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.embedding(input_ids, beside)
        return output

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        inputs = None if self.per_layer_embedding is None else self.per_layer_embedding(input_ids, x)
        rotations = {kind: rotary(positions) for kind, rotary in self.rotary.items()}
        needed, first_shared = attention.needed, self.config.first_shared_layer
        tokens = None if needed is None else needed.tokens
        # Behind the last keys and values nobody reads what is made of tokens that are not needed.
        x = self._run_layers(0, first_shared, x, rotations, attention, inputs, tokens)
        if tokens is not None and not len(tokens):
            return x
        if first_shared < self.num_layers:
            if tokens is not None:
                rotations = {
                    kind: (cosine[tokens], sine[tokens]) for kind, (cosine, sine) in rotations.items()
                }
                inputs = None if inputs is None else inputs[tokens]
                attention = attention.narrow()
            x = self._run_layers(first_shared, self.num_layers, x, rotations, attention, inputs)
        output: torch.Tensor = self.norm(x)
        return output if needed is None else needed.spread(output, len(input_ids))

    def _run_layers(
        self,
        first: int,
        end: int,
        x: torch.Tensor,
        rotations: Mapping[str, Rotation],
        attention: AttentionContext,
        layer_inputs: torch.Tensor | None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Layers first .. end - 1. layer_inputs: [num_tokens, num_layers, per-layer size]. `tokens`: the only ones that
        the last layer goes on with behind its attention, and that are returned; of none, what is returned is no output.
        """
        normed = None
        for index in range(first, end):
            layer = self.layers[index]
            assert isinstance(layer, GemmaDecoderLayer)
            attention.observe(index, x)
            normed = layer.input_norm(x) if normed is None else normed
            only = tokens if index + 1 == end else None
            if only is not None and not len(only):
                layer.attention.attend(normed, rotations[layer.layer_type], attention)
                return x
            x, normed = layer(
                x,
                normed,
                rotations[layer.layer_type],
                attention,
                layer_input=None if layer_inputs is None else layer_inputs[:, index],
                next_norm=self.layers[index + 1].input_norm if index + 1 < end else None,
                tokens=only,
            )
        return x

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.embedding.logits(hidden_states)
        cap = self.config.final_softcap
        return logits if cap is None else softcap(logits, cap)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        targets = dict(self._checkpoint_tensors())
        load_strict(type(self).__name__, targets, gemma_tensors(weights, self.config), tied)

    def _checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.embedding.checkpoint_tensors("model.embed_tokens")
        if self.per_layer_embedding is not None:
            yield from self.per_layer_embedding.checkpoint_tensors("model.")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, GemmaDecoderLayer)
            yield from layer.checkpoint_tensors(f"model.layers.{index}.")
        yield from self.norm.checkpoint_tensors("model.norm")
