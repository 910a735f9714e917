"""Part A of a step: the target's forward pass, from the gathered batch to logits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.backend import AttentionBackend, AttentionContext
from engine.attention.metadata import LayerKVCache, NeededTokens
from engine.batch.input_batch import InputBatch
from engine.kv_spec import KVGroupSpec
from engine.models.base import CausalLM
from engine.step import GraphKind


@dataclass(frozen=True, kw_only=True)
class TargetStates:
    """What a forward pass leaves for the step's second half; valid until the next pass."""

    hidden_states: torch.Tensor  # [num_tokens, hidden_size]
    aux_hidden_states: Mapping[int, torch.Tensor]  # target layer -> its input, [num_tokens, hidden_size]
    logits: torch.Tensor  # [num_logits, vocab_size]
    kind: GraphKind = "eager"
    num_padding_tokens: int = 0


class TargetForward(Protocol):
    """`needed`: the tokens whose hidden states are used; None: all."""

    def forward(self, batch: InputBatch, needed: NeededTokens | None) -> TargetStates: ...


class EagerTarget:
    """Launch by launch, any batch."""

    def __init__(
        self,
        *,
        model: CausalLM,
        backend: AttentionBackend,
        groups: Sequence[KVGroupSpec],
        caches: Mapping[int, LayerKVCache],
        aux_layers: Collection[int],
    ) -> None:
        self.model = model
        self.backend = backend
        self.groups = groups
        self.caches = caches
        self.aux_layers = aux_layers

    def forward(self, batch: InputBatch, needed: NeededTokens | None) -> TargetStates:
        attention = AttentionContext(
            self.backend, batch.attention, self.groups, self.caches, self.aux_layers, needed
        )
        hidden_states = self.model(batch.input_ids, batch.attention.positions, attention)
        logits = self.model.compute_logits(batch.of_logits_rows(hidden_states))
        return TargetStates(
            hidden_states=hidden_states, aux_hidden_states=attention.aux_hidden_states, logits=logits
        )
