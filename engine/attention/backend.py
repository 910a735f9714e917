"""The attention contract: a backend prepares a step once, then serves every layer of it.

A backend knows layouts and kernels; it does not know models, requests or draft methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from engine.attention.metadata import AttentionInputs, LayerKVCache, NeededTokens
from engine.kv_spec import KVGroupSpec


class AttentionBackend(ABC):
    """One per device and process; stateless between steps."""

    is_capturable: ClassVar[bool] = False
    """May its launches be captured into a graph and replayed at other lengths? They read all lengths on the device."""

    @abstractmethod
    def prepare(self, inputs: AttentionInputs, groups: Sequence[KVGroupSpec]) -> list[Any]:
        """Metadata of the step, one entry per KV group. No host sync."""

    @abstractmethod
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: LayerKVCache, metadata: Any) -> None:
        """Store key and value [num_tokens, num_kv_heads, head_size] at the slots of the step's slot mapping;
        PAD_SLOT_ID stores nothing."""

    @abstractmethod
    def attend(self, query: torch.Tensor, cache: LayerKVCache, metadata: Any, scale: float) -> torch.Tensor:
        """Causal attention over the cache (the step's own keys were written before).

        query: [num_tokens, num_heads, head_size]; returns the same shape and dtype. Grouped queries: head h reads
        KV head h // (num_heads // num_kv_heads). The window is the group's.
        """


class AttentionContext:
    """What a model's forward pass gets: the caches of its layers and the step's metadata, by KV group."""

    def __init__(
        self,
        backend: AttentionBackend,
        inputs: AttentionInputs,
        groups: Sequence[KVGroupSpec],
        caches: Mapping[int, LayerKVCache],
        aux_layers: Collection[int] = (),
        needed: NeededTokens | None = None,
    ) -> None:
        self.backend = backend
        self.inputs = inputs
        self.groups = groups
        self.caches = caches
        self.metadata = backend.prepare(inputs, groups)
        self.needed = needed  # the tokens whose final hidden states are used; None: all
        self.aux_hidden_states: dict[int, torch.Tensor] = {}  # layer -> its input, for the layers asked for
        self._aux_layers = frozenset(aux_layers)
        self._group_of_layer = {
            layer: index for index, group in enumerate(groups) for layer in group.layer_indices
        }

    def narrow(self) -> AttentionContext:
        """Of the needed tokens alone, at least one, for layers that write no cache: `needed.tokens`, in that order."""
        assert self.needed is not None, "all tokens are needed"
        inputs = self.inputs.last_tokens(self.needed)
        return AttentionContext(self.backend, inputs, self.groups, self.caches)

    def observe(self, layer_index: int, hidden_states: torch.Tensor) -> None:
        """The input of a layer, [num_tokens, hidden_size], before any norm; kept if a drafter wants it."""
        if layer_index in self._aux_layers:
            self.aux_hidden_states[layer_index] = hidden_states

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Write this layer's key and value (unless None: a layer that reads another's cache), then attend."""
        group = self._group_of_layer[layer_index]
        cache = self.caches[layer_index]
        if key is not None and value is not None:
            self.backend.write_kv(key, value, cache, self.metadata[group])
        return self.backend.attend(query, cache, self.metadata[group], scale)
