"""Gemma 4 for training: what engine/models/gemma4.py computes, differentiable and over whole rows.

Module names are the checkpoint's tensor names, so that a state dict is a checkpoint. Dense layers only: no experts, no
keys that serve as values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.errors import CheckpointError
from engine.kernels.rotary import rotate_reference
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.models.gemma4_config import read_gemma4_config
from engine.models.gemma_config import SLIDING, GemmaConfig, GemmaLayerConfig
from tools.train.attention import KeysValues, as_bias, attend, visible_keys
from tools.train.rows import Batch

_INIT_STD = 0.02
_INIT_BRANCH = 0.3  # weight of the norm behind a branch: the residual stream grows slowly with depth


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


def _rms_norm(size: int, eps: float, weight: float = 1.0) -> nn.RMSNorm:
    norm = nn.RMSNorm(size, eps)
    nn.init.constant_(norm.weight, weight)
    return norm


class GemmaSelfAttention(nn.Module):
    """Queries, and keys and values where the layer has its own. The score is not scaled: norms of queries and keys
    begin where others divide by the root of the head size.
    """

    def __init__(self, config: GemmaConfig, layer: GemmaLayerConfig, *, has_own_kv: bool) -> None:
        super().__init__()
        size, head_size, eps = config.hidden_size, layer.head_size, config.rms_norm_eps
        self._head_size, self._eps = head_size, eps
        self._scale = config.attention_scale
        self.has_own_kv = has_own_kv
        self.q_proj = _linear(size, config.num_heads * head_size)
        self.o_proj = _linear(config.num_heads * head_size, size)
        self.q_norm = _rms_norm(head_size, eps, head_size**-0.25)
        if has_own_kv:
            self.k_proj = _linear(size, layer.num_kv_heads * head_size)
            self.v_proj = _linear(size, layer.num_kv_heads * head_size)
            self.k_norm = _rms_norm(head_size, eps, head_size**-0.25)

    def keys_values(self, x: torch.Tensor, rotation: Rotation) -> KeysValues:
        """x: [num_tokens, hidden_size], normed."""
        key = rotate_reference(self.k_norm(self._heads(self.k_proj(x))), *rotation)
        value = self._heads(self.v_proj(x))
        return key, F.rms_norm(value, (self._head_size,), None, self._eps)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, keys_values: KeysValues, bias: torch.Tensor
    ) -> torch.Tensor:
        """x: [num_tokens, hidden_size], normed; returns the same shape."""
        query = rotate_reference(self.q_norm(self._heads(self.q_proj(x))), *rotation)
        output: torch.Tensor = self.o_proj(attend(query, *keys_values, bias, self._scale))
        return output

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self._head_size)


class GemmaMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden_size, intermediate_size)
        self.up_proj = _linear(hidden_size, intermediate_size)
        self.down_proj = _linear(intermediate_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return output


class GemmaLayer(nn.Module):
    """One decoder layer; `per_layer_size`: of its own embeddings, 0 for none."""

    def __init__(
        self, config: GemmaConfig, layer: GemmaLayerConfig, *, has_own_kv: bool, per_layer_size: int = 0
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.layer_type = layer.layer_type
        self.input_layernorm = _rms_norm(size, eps)
        self.self_attn = GemmaSelfAttention(config, layer, has_own_kv=has_own_kv)
        self.post_attention_layernorm = _rms_norm(size, eps, _INIT_BRANCH)
        self.pre_feedforward_layernorm = _rms_norm(size, eps)
        self.mlp = GemmaMLP(size, layer.intermediate_size)
        self.post_feedforward_layernorm = _rms_norm(size, eps, _INIT_BRANCH)
        self.has_per_layer_input = per_layer_size > 0
        if self.has_per_layer_input:
            self.per_layer_input_gate = _linear(size, per_layer_size)
            self.per_layer_projection = _linear(per_layer_size, size)
            self.post_per_layer_input_norm = _rms_norm(size, eps, _INIT_BRANCH)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        bias: torch.Tensor,
        shared: KeysValues | None,
        layer_input: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, KeysValues]:
        """x: [num_tokens, hidden_size]; `shared`: keys and values of another layer, for one without its own;
        layer_input: [num_tokens, per_layer_size]. Returns the shape of x, and the keys and values that it read.
        """
        normed = self.input_layernorm(x)
        keys_values = self.self_attn.keys_values(normed, rotation) if self.self_attn.has_own_kv else shared
        assert keys_values is not None, "a layer without keys and values needs those of another"
        x = x + self.post_attention_layernorm(self.self_attn(normed, rotation, keys_values, bias))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if self.has_per_layer_input:
            assert layer_input is not None
            gated = F.gelu(self.per_layer_input_gate(x), approximate="tanh") * layer_input
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar, keys_values


class Rotations(nn.Module):
    """Cosines and sines of each layer type."""

    def __init__(self, config: GemmaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._of_kind = {
            kind: RotaryEmbedding(rope, dtype=dtype, device=device) for kind, rope in config.rope.items()
        }

    def forward(self, positions: torch.Tensor) -> dict[str, Rotation]:
        """positions: [num_tokens] int64."""
        return {kind: rotary(positions) for kind, rotary in self._of_kind.items()}


class GemmaBody(nn.Module):
    """`model.` of a checkpoint."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        per_layer = config.per_layer_input
        per_layer_size = 0 if per_layer is None else per_layer.size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if per_layer is not None:
            width = len(config.layers) * per_layer.size
            self.embed_tokens_per_layer = nn.Embedding(per_layer.vocab_size, width)
            self.per_layer_model_projection = _linear(size, width)
            self.per_layer_projection_norm = _rms_norm(per_layer.size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            GemmaLayer(config, layer, has_own_kv=layer.kv_source == index, per_layer_size=per_layer_size)
            for index, layer in enumerate(config.layers)
        )
        self.norm = _rms_norm(size, config.rms_norm_eps)


class GemmaForTraining(nn.Module):
    """A target. `raw`: its config.json; `dropout`: of what comes out of the tables, in training. Raises CheckpointError
    for what this module cannot compute."""

    def __init__(
        self, raw: Mapping[str, Any], dtype: torch.dtype, device: torch.device, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.config = read_gemma4_config(raw)
        if self.config.experts is not None or not all(layer.has_value_proj for layer in self.config.layers):
            raise CheckpointError(
                "a target with experts or attention_k_eq_v: expected a dense one with values of its own"
            )
        self.model = GemmaBody(self.config)
        self._dropout = nn.Dropout(dropout)
        init_weights(self)
        self.to(device=device, dtype=dtype)
        self._rotations = Rotations(self.config, dtype, device)
        size = self.config.hidden_size
        self._scale = torch.tensor(math.sqrt(size), dtype=dtype).item()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states after the final norm, [num_tokens, hidden_size]."""
        token_ids = batch.token_ids.flatten()
        x = self._dropout(self.model.embed_tokens(token_ids)) * self._scale
        layer_inputs = self._layer_inputs(token_ids, x)
        rotations = self._rotations(batch.positions.flatten())
        windows = {kind: self.config.window if kind == SLIDING else None for kind in self.config.layer_types}
        biases = {kind: as_bias(visible_keys(batch, window), x.dtype) for kind, window in windows.items()}
        shared: dict[str, KeysValues] = {}
        for index, layer in enumerate(self.model.layers):
            kind = self.config.layer_types[index]
            layer_input = None if layer_inputs is None else layer_inputs[:, index]
            x, shared[kind] = layer(x, rotations[kind], biases[kind], shared.get(kind), layer_input)
        output: torch.Tensor = self.model.norm(x)
        return output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32 (float64 for float64)."""
        logits = F.linear(hidden, self.model.embed_tokens.weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _layer_inputs(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """[num_tokens, num_layers, per-layer size]"""
        per_layer = self.config.per_layer_input
        if per_layer is None:
            return None
        shape = (len(self.config.layers), per_layer.size)
        scale = torch.tensor(math.sqrt(per_layer.size), dtype=x.dtype).item()
        of_token = (self._dropout(self.model.embed_tokens_per_layer(token_ids)) * scale).view(-1, *shape)
        projected = self.model.per_layer_model_projection(x) * self.config.hidden_size**-0.5
        mixed: torch.Tensor = (
            self.model.per_layer_projection_norm(projected.view(-1, *shape)) + of_token
        ) * 2**-0.5
        return mixed


def init_weights(module: nn.Module) -> None:
    """Matrices and tables ~ N(0, 0.02), from torch's default generator."""
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            nn.init.normal_(child.weight, std=_INIT_STD)
