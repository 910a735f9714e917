"""The EAGLE-3 draft head (Li et al. 2025, arXiv:2503.01840): inputs of three target layers, fused once per target
row; a first layer that reads [embedding, hidden] at twice the width; a draft vocabulary with its own head, or, if the
config says `shares_target_head`, with the target's rows of these tokens.

Tensor names: `midlayer.` (first releases) or `layers.0.`; `d2t` holds offsets: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.errors import CheckpointError
from engine.kv_spec import KVGroupSpec
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.models.base import CausalLM
from engine.models.decoder_config import DecoderConfig, flag, positive_int
from engine.models.eagle import check_fits_target, without_embedding
from engine.models.llama import DecoderLayer, SelfAttention, llama_kv_group
from engine.models.weights import load_strict

_LARGE = 1024.0  # a power of two: a linear head multiplies by it exactly, a cap shows


class FirstEagle3Layer(DecoderLayer):
    """Attention over [input norm(embedding), hidden norm(hidden)], then the MLP; the residual is the hidden."""

    def __init__(
        self, config: DecoderConfig, *, norm_before_residual: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, 0, dtype, device)
        self.attention = SelfAttention(replace(config, hidden_size=2 * config.hidden_size), 0, dtype, device)
        output = [("o_proj", config.hidden_size)]
        query_size = config.num_heads * config.head_size
        self.attention.output = Linear(
            query_size, output, bias=config.has_output_bias, dtype=dtype, device=device
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self._norm_before_residual = norm_before_residual

    def forward_pair(
        self, embedding: torch.Tensor, hidden: torch.Tensor, rotation: Rotation, context: AttentionContext
    ) -> torch.Tensor:
        """embedding, hidden: [num_tokens, hidden_size]; returns the same shape."""
        pair = self.attention_norm.pair(embedding, self.hidden_norm, hidden)
        residual = pair[:, hidden.shape[-1] :].contiguous() if self._norm_before_residual else hidden
        return self.after_attention(residual, self.attention.attend(pair, rotation, context))

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().checkpoint_tensors(prefix)
        yield from self.hidden_norm.checkpoint_tensors(f"{prefix}hidden_norm")


class Eagle3DraftModel(nn.Module):
    """Shares the target's embedding. `aux_layers`: target layers whose inputs it wants."""

    def __init__(
        self, config: dict[str, Any], target: CausalLM, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.config = DecoderConfig.from_raw(config)
        check_fits_target(self.config, target)
        _refuse_unsupported(config)
        self.dtype = dtype
        self.aux_layers = _aux_layers(config, target.num_layers)
        hidden_size, eps = self.config.hidden_size, self.config.rms_norm_eps
        aux_size = len(self.aux_layers) * target.hidden_size
        self.fc = Linear(aux_size, [("fc", hidden_size)], bias=False, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(self.config.rope, dtype=dtype, device=device)
        first = FirstEagle3Layer(
            self.config,
            norm_before_residual=flag(config, "norm_before_residual"),
            dtype=dtype,
            device=device,
        )
        others = [
            DecoderLayer(self.config, index, dtype, device) for index in range(1, self.config.num_layers)
        ]
        self.layers = nn.ModuleList([first, *others])
        self.norm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        draft_vocab_size = positive_int(config, "draft_vocab_size", self.config.vocab_size)
        self.head = TokenEmbedding(draft_vocab_size, hidden_size, dtype=dtype, device=device)
        self.register_buffer("target_ids", torch.arange(draft_vocab_size, device=device), persistent=False)
        self._target = (target,)  # in a tuple: it is no part of this module
        self._has_own_head = not flag(config, "shares_target_head")

    def kv_group(self, name: str) -> KVGroupSpec:
        return llama_kv_group(name, self.config, self.dtype)

    def combine(self, aux_hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Inputs of the wanted target layers, [num_tokens, hidden_size] each -> [num_tokens, hidden_size]."""
        output: torch.Tensor = self.fc(torch.cat(list(aux_hidden_states), dim=-1))
        return output

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (normed for the head, un-normed to be fed back), [num_tokens, hidden_size] each."""
        rotation = self.rotary(positions)
        first = self.layers[0]
        assert isinstance(first, FirstEagle3Layer)
        x = first.forward_pair(self._target[0].embed(input_ids), hidden_states, rotation, attention)
        for layer in list(self.layers)[1:]:
            x = layer(x, rotation, attention)
        return self.norm(x), x

    def compute_logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [n, hidden_size]. Returns logits [n, draft_vocab] of dtype and the target's ids of them, int64 of the
        same shape; all other tokens have no probability."""
        target_ids = self.target_ids
        assert isinstance(target_ids, torch.Tensor)
        return self.head.logits(hidden), target_ids.expand(len(hidden), -1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises CheckpointError for missing, unknown or misshapen tensors, and ids outside the target."""
        own = self._without_map(weights)
        every = own if self._has_own_head else chain(own, self._shared_head())
        load_strict(type(self).__name__, dict(self._checkpoint_tensors()), every)

    def _without_map(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Without what is no parameter: t2d serves training, d2t says which tokens can be drafted."""
        has_map = False
        for name, weight in without_embedding(weights, self._target[0]):
            if name == "d2t":
                has_map = True
                self._set_target_ids(weight)
            elif name != "t2d":
                yield name.replace("midlayer.", "layers.0."), weight
        num_drafted = self.head.weight.shape[0]
        if not has_map and num_drafted != self.config.vocab_size:
            raise CheckpointError(
                f"d2t: missing, expected the tokens that a draft vocabulary of {num_drafted} stands for"
            )

    def _shared_head(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The target's rows of the tokens that can be drafted, whatever it calls them: a head is linear, its logits of
        unit vectors are its columns. Comes behind all other tensors: then it is known which tokens these are."""
        target, target_ids = self._target[0], self.target_ids
        assert isinstance(target_ids, torch.Tensor)
        units = torch.eye(target.hidden_size, dtype=self.dtype, device=target_ids.device)
        columns = target.compute_logits(units)
        if not torch.equal(target.compute_logits(_LARGE * units[:1]), _LARGE * columns[:1]):
            raise CheckpointError(
                "shares_target_head: got a target whose logits are capped, expected a linear head"
            )
        yield "lm_head.weight", columns[:, target_ids].T

    def _set_target_ids(self, offsets: torch.Tensor) -> None:
        own_ids = self.target_ids
        assert isinstance(own_ids, torch.Tensor)
        if offsets.shape != own_ids.shape:
            raise CheckpointError(f"d2t: got shape {list(offsets.shape)}, expected {list(own_ids.shape)}")
        target_ids = own_ids + offsets.to(own_ids.device)
        if bool(((target_ids < 0) | (target_ids >= self.config.vocab_size)).any()):  # sync: at start-up
            raise CheckpointError(
                f"d2t: got ids outside the vocabulary, expected 0..{self.config.vocab_size - 1}"
            )
        if torch.unique(target_ids).numel() < target_ids.numel():  # sync: at start-up
            raise CheckpointError("d2t: got the same id for several draft tokens, expected one each")
        own_ids.copy_(target_ids)

    def _checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.fc.checkpoint_tensors("")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.checkpoint_tensors(f"layers.{index}.")
        yield from self.norm.checkpoint_tensors("norm")
        yield from self.head.checkpoint_tensors("lm_head")


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """Raise CheckpointError for what other heads do and this one would compute otherwise."""
    values = {**(config.get("eagle_config") or {}), **config}
    for key, expected in (
        ("use_aux_hidden_state", True),
        ("norm_output", False),  # the normed output would be fed back
        ("parallel_drafting", False),
        ("logit_scale", 1.0),
    ):
        if (got := values.get(key, expected)) != expected:
            raise CheckpointError(f"draft head {key}: got {got!r}, expected {expected!r}")


def _aux_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers named by the config, else those of the paper's released heads."""
    named = config.get("eagle_aux_hidden_state_layer_ids") or (config.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    layers = tuple(named) if named else (2, num_layers // 2, num_layers - 3)
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise CheckpointError(
                f"eagle_aux_hidden_state_layer_ids: got layer {layer}, expected 0..{num_layers - 1}"
            )
    return layers
