"""The MTP drafter of Gemma 4 ("assistant"): a small decoder with queries only, over the target's KV cache.

It shares the target's scaled embedding and reads, in each layer, the cache of the target's last layer of that type that
has KV of its own. Heads and head sizes of that cache are the target's, whatever the drafter's config says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.errors import CheckpointError
from engine.kv_spec import KVGroupSpec
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.norm import GemmaRMSNorm
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.models.base import CausalLM
from engine.models.centroid_head import CentroidHead
from engine.models.decoder_config import flag, positive_int
from engine.models.gemma4_config import read_gemma4_config
from engine.models.gemma_config import GemmaConfig, text_config
from engine.models.gemma_layers import GemmaDecoderLayer
from engine.models.weights import load_strict

ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_TOKEN_ORDERING = "masked_embedding.token_ordering"


class Gemma4AssistantModel(nn.Module):
    """`raw`: the checkpoint's config.json. Raises CheckpointError unless it fits the target."""

    def __init__(
        self, raw: Mapping[str, Any], target: CausalLM, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        config, sources = _read_config(raw, target)
        hidden_size, backbone_size = config.hidden_size, target.hidden_size
        self.config = config
        self.pre_projection = _linear(
            "pre_projection", 2 * backbone_size, hidden_size, dtype=dtype, device=device
        )
        self.post_projection = _linear(
            "post_projection", hidden_size, backbone_size, dtype=dtype, device=device
        )
        self.rotary = nn.ModuleDict(
            {kind: RotaryEmbedding(rope, dtype=dtype, device=device) for kind, rope in config.rope.items()}
        )
        self.layers = nn.ModuleList(
            GemmaDecoderLayer(config, layer, source, has_own_kv=False, dtype=dtype, device=device)
            for layer, source in zip(config.layers, sources, strict=True)
        )
        self.norm = GemmaRMSNorm(hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head = TokenEmbedding(config.vocab_size, hidden_size, dtype=dtype, device=device)
        self.centroid_head: CentroidHead | None = None
        if flag(raw, "use_ordered_embeddings"):
            self.centroid_head = CentroidHead(
                self.head,
                positive_int(raw, "num_centroids"),
                positive_int(raw, "centroid_intermediate_top_k"),
                dtype=dtype,
                device=device,
            )
        self._embed = (target.embed,)  # in a tuple: the target is no part of this module

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        rotations: Mapping[str, Rotation],
        attention: AttentionContext,
    ) -> torch.Tensor:
        """input_ids: [num_tokens] int64; hidden_states: [num_tokens, the target's hidden_size], of the target or what
        `feed_back` gives; rotations: by layer type. Returns [num_tokens, hidden_size], normed for the head.
        """
        x = self.pre_projection(self._embed[0](input_ids, hidden_states))
        layers = cast("list[GemmaDecoderLayer]", list(self.layers))
        norms = [*(layer.input_norm for layer in layers), self.norm]
        normed: torch.Tensor = norms[0](x)
        for layer, next_norm in zip(layers, norms[1:], strict=True):
            x, normed = layer(x, normed, rotations[layer.layer_type], attention, next_norm=next_norm)
        return normed

    def rotations(self, positions: torch.Tensor) -> dict[str, Rotation]:
        """positions: [num_tokens] int64."""
        return {kind: rotary(positions) for kind, rotary in self.rotary.items()}

    def feed_back(self, normed: torch.Tensor) -> torch.Tensor:
        """What `forward` returned, [num_tokens, hidden_size] -> in the target's place, [num_tokens, the target's]."""
        output: torch.Tensor = self.post_projection(normed)
        return output

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises CheckpointError for missing, unknown or misshapen tensors."""
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        load_strict(type(self).__name__, dict(self._checkpoint_tensors()), self._floats_of(weights), tied)
        if self.centroid_head is not None and not self.centroid_head.has_ordering:
            raise CheckpointError(f"the checkpoint does not fit the drafter; missing: {_TOKEN_ORDERING}")

    def _floats_of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name == _TOKEN_ORDERING and self.centroid_head is not None:
                self.centroid_head.set_ordering(name, tensor)
            else:
                yield name, tensor

    def _checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.pre_projection.checkpoint_tensors("")
        yield from self.post_projection.checkpoint_tensors("")
        yield from self.head.checkpoint_tensors("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, GemmaDecoderLayer)
            yield from layer.checkpoint_tensors(f"model.layers.{index}.")
        yield from self.norm.checkpoint_tensors("model.norm")
        if self.centroid_head is not None:
            yield from self.centroid_head.checkpoint_tensors("masked_embedding.")


def _linear(
    name: str, in_features: int, out_features: int, *, dtype: torch.dtype, device: torch.device
) -> Linear:
    return Linear(in_features, [(name, out_features)], bias=False, dtype=dtype, device=device)


def _read_config(raw: Mapping[str, Any], target: CausalLM) -> tuple[GemmaConfig, list[int]]:
    """The drafter's config with the target's KV geometry, and which target layer each of its layers reads."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not set(architectures) & set(ARCHITECTURES):
        raise CheckpointError(f"drafter architectures: got {architectures!r}, expected {ARCHITECTURES[0]!r}")
    text = text_config(raw)
    # All its layers read the target's cache, also where the file does not say so.
    config = read_gemma4_config({**text, "num_kv_shared_layers": len(text.get("layer_types") or ())})
    for key, got, expected in (
        ("backbone_hidden_size", raw.get("backbone_hidden_size"), target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size_per_layer_input", text.get("hidden_size_per_layer_input") or 0, 0),
        ("enable_moe_block", bool(text.get("enable_moe_block")), False),
        ("use_double_wide_mlp", bool(text.get("use_double_wide_mlp")), False),
        ("final_logit_softcapping", config.final_softcap, None),
    ):
        if got != expected:
            raise CheckpointError(f"drafter {key}: got {got!r}, expected {expected!r} for this target model")
    sources = target.shareable_kv()
    layers, indices = [], []
    for index, layer in enumerate(config.layers):
        source = sources.get(layer.layer_type)
        if source is None:
            raise CheckpointError(
                f"drafter layer {index}: reads the KV of a {layer.layer_type} layer, but the target model shares "
                f"that of {', '.join(sources) or 'no layers'}"
            )
        group = _group_of(target, source)
        if (layer.head_size, config.window) != (group.head_size, group.window or config.window):
            raise CheckpointError(
                f"drafter layer {index}: got head_dim {layer.head_size} and sliding_window {config.window}, expected "
                f"{group.head_size} and {group.window or 'any'}, the target model's"
            )
        if config.num_heads % group.num_kv_heads:
            raise CheckpointError(
                f"drafter num_attention_heads: got {config.num_heads}, expected a multiple of {group.num_kv_heads}, "
                f"the KV heads of the target's {layer.layer_type} layers"
            )
        layers.append(replace(layer, num_kv_heads=group.num_kv_heads))
        indices.append(source)
    return replace(config, layers=tuple(layers)), indices


def _group_of(target: CausalLM, layer: int) -> KVGroupSpec:
    return next(group for group in target.kv_groups() if layer in group.layer_indices)
