"""The EAGLE draft head (Li et al. 2024, arXiv:2401.15077): one Llama layer over (embedding of x_{p+1}, hidden h_p).

The first layer has no input norm, there is no final norm and no head: the target's embedding and head are used, and
the layer's output is both what the head reads and what is fed back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.errors import CheckpointError
from engine.kv_spec import KVGroupSpec
from engine.layers.linear import Linear
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.models.base import CausalLM
from engine.models.decoder_config import DecoderConfig, flag
from engine.models.llama import DecoderLayer, llama_kv_group
from engine.models.weights import load_strict

NUM_COMPARED_ROWS = 64  # of two embeddings, at most


class FirstEagleLayer(DecoderLayer):
    """A Llama layer whose attention reads its input as it is."""

    def forward(self, x: torch.Tensor, rotation: Rotation, context: AttentionContext) -> torch.Tensor:
        return self.after_attention(x, self.attention.attend(x, rotation, context))

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        norm = dict(self.attention_norm.checkpoint_tensors(f"{prefix}input_layernorm"))
        yield from (item for item in super().checkpoint_tensors(prefix) if item[0] not in norm)


class EagleDraftModel(nn.Module):
    """fc, then the decoder layers. Shares the target's embedding; the checkpoint's copy of it must be equal."""

    def __init__(
        self, config: dict[str, Any], target: CausalLM, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.config = DecoderConfig.from_raw(config)
        check_fits_target(self.config, target)
        self.dtype = dtype
        self.max_position_embeddings = self.config.max_position_embeddings
        hidden_size = self.config.hidden_size
        has_bias = flag({"bias": True, **config}, "bias")
        self.fc = Linear(2 * hidden_size, [("fc", hidden_size)], bias=has_bias, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(self.config.rope, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            (DecoderLayer if index else FirstEagleLayer)(self.config, index, dtype, device)
            for index in range(self.config.num_layers)
        )
        self._target = (target,)  # in a tuple: it is no part of this module

    def kv_group(self, name: str) -> KVGroupSpec:
        return llama_kv_group(name, self.config, self.dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: AttentionContext,
    ) -> torch.Tensor:
        """input_ids, positions: [num_tokens] int64; hidden_states: [num_tokens, hidden_size]; returns the same."""
        x: torch.Tensor = self.fc(self._target[0].embed(input_ids, hidden_states))
        rotation = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotation, attention)
        return x

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises CheckpointError for missing, unknown or misshapen tensors, and for an embedding of its own."""
        own = without_embedding(weights, self._target[0])
        load_strict(type(self).__name__, dict(self._checkpoint_tensors()), own)

    def _checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.fc.checkpoint_tensors("")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.checkpoint_tensors(f"layers.{index}.")


def check_fits_target(config: DecoderConfig, target: CausalLM) -> None:
    """Raise CheckpointError for a head of another hidden size or vocabulary."""
    for key, got, expected in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if got != expected:
            raise CheckpointError(f"draft head {key}: got {got}, expected {expected}, the target model's")


def without_embedding(
    weights: Iterable[tuple[str, torch.Tensor]], target: CausalLM
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors but the copy of the target's embedding. Raises CheckpointError for another embedding."""
    for name, weight in weights:
        if name != "embed_tokens.weight":
            yield name, weight
        elif not _is_embedding_of(target, weight):
            raise CheckpointError(f"{name}: got other values than the target model's, expected a copy")


def _is_embedding_of(target: CausalLM, weight: torch.Tensor) -> bool:
    """As far as some rows tell, up to the factor by which some targets scale theirs, and up to rounding: that of four
    bits, in which a GGUF target may hold it, is a tenth."""
    if weight.shape != (target.vocab_size, target.hidden_size):
        return False
    step = -(-target.vocab_size // NUM_COMPARED_ROWS)
    token_ids = torch.arange(0, target.vocab_size, step, device=next(target.parameters()).device)
    expected = target.embed(token_ids).cpu().double()
    rows = weight[::step].cpu().double()
    difference = rows * (expected.norm() / rows.norm()) - expected
    return bool(difference.norm() < 0.25 * expected.norm())  # sync: at start-up
