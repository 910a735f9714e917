"""The attention contract: a backend prepares a step once, then serves every layer of it.

A backend knows layouts and kernels; it does not know models, requests or draft methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from engine.attention.latent import LatentForms, LatentPlan, LatentQuery, plan_latent
from engine.attention.metadata import AttentionInputs, LayerKVCache, NeededTokens
from engine.kernels.attention_heads import HeadLayout, split_heads
from engine.kv_spec import KVGroupSpec


class AttentionBackend(ABC):
    """One per device and process; stateless between steps."""

    is_capturable: ClassVar[bool] = False
    """May its launches be captured into a graph and replayed at other lengths? They read all lengths on the device."""

    is_exact: ClassVar[bool] = False
    """Do a row's bits depend on the row alone, not on the batch or the chunk? (Attention over latents aside.)"""

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Can it compute there?"""
        return True

    @abstractmethod
    def prepare(self, inputs: AttentionInputs, groups: Sequence[KVGroupSpec]) -> list[Any]:
        """Metadata of the step, one entry per KV group. No host sync."""

    @abstractmethod
    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor | None, cache: LayerKVCache, metadata: Any
    ) -> None:
        """Store key and value [num_tokens, num_kv_heads, head_size] at the slots of the step's slot mapping;
        PAD_SLOT_ID stores nothing. No value: it is a part of the key."""

    def store_heads(
        self,
        heads: torch.Tensor,
        layout: HeadLayout,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: LayerKVCache,
        metadata: Any,
    ) -> torch.Tensor:
        """Norm and rotate the heads of a fused projection, [num_tokens, heads, head_size], and store keys and values.
        Returns the query heads."""
        query, key, value = split_heads(heads, layout, *rotation)
        if key is not None and value is not None:
            self.write_kv(key, value, cache, metadata)
        return query

    @abstractmethod
    def attend(self, query: torch.Tensor, cache: LayerKVCache, metadata: Any, scale: float) -> torch.Tensor:
        """Causal attention over the cache (the step's own keys were written before).

        query: [num_tokens, num_heads, head_size]; returns the same shape and dtype, but as wide as the cache's values.
        Grouped queries: head h reads KV head h // (num_heads // num_kv_heads). The window is the group's.
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
        self.metadata = self._prepare(inputs)
        self.needed = needed  # the tokens whose final hidden states are used; None: all
        self.aux_hidden_states: dict[int, torch.Tensor] = {}  # layer -> its input, for the layers asked for
        self._aux_layers = frozenset(aux_layers)
        self._latent_plans: dict[int, LatentPlan | None] = {}  # by KV group
        self._group_of_layer = {
            layer: index for index, group in enumerate(groups) for layer in group.layer_indices
        }

    def _prepare(self, inputs: AttentionInputs) -> list[Any]:
        return self.backend.prepare(inputs, self.groups)

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
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write this layer's key and value, then attend: for layers that prepare their heads themselves."""
        group = self._group_of_layer[layer_index]
        cache, metadata = self.caches[layer_index], self.metadata[group]
        self.backend.write_kv(key, value, cache, metadata)
        return self.backend.attend(query, cache, metadata, scale)

    def attend_heads(
        self,
        layer_index: int,
        heads: torch.Tensor,
        layout: HeadLayout,
        rotation: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """Norm, rotate and store what a layer projected, then attend. Returns [num_tokens, num_heads, head_size]."""
        group = self._group_of_layer[layer_index]
        cache, metadata = self.caches[layer_index], self.metadata[group]
        query = self.backend.store_heads(heads, layout, rotation, cache, metadata)
        return self.backend.attend(query, cache, metadata, scale)

    def attend_latent(
        self, layer_index: int, query: LatentQuery, latent: torch.Tensor, forms: LatentForms, scale: float
    ) -> torch.Tensor:
        """Write this layer's latent rows [num_tokens, 1, latent_size + rope_size], then attend, each request in the
        form that suits its number of query tokens. Returns [num_tokens, num_heads, value_size]."""
        group = self._group_of_layer[layer_index]
        cache, metadata = self.caches[layer_index], self.metadata[group]
        self.backend.write_kv(latent, None, cache, metadata)
        plan = self._latent_plan(group)
        if plan is None:
            return forms.release(self.backend.attend(forms.absorb(query), cache, metadata, scale))
        parts = [item.attend(query, cache.key, forms, scale) for item in plan.expanded]
        if plan.absorbed is not None:
            tokens, absorbed_metadata = plan.absorbed
            short = forms.absorb(LatentQuery(query.plain[tokens], query.rotated[tokens]))
            parts.append(forms.release(self.backend.attend(short, cache, absorbed_metadata[group], scale)))
        return torch.cat(parts)[plan.order]

    def _latent_plan(self, group: int) -> LatentPlan | None:
        if group not in self._latent_plans:
            self._latent_plans[group] = plan_latent(self.inputs, group, self._prepare)
        return self._latent_plans[group]
