"""Paged attention by our Triton kernels; engine/attention/torch_backend.py is its oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from triton import knobs

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionInputs, LayerKVCache
from engine.kernels.attention_heads import HeadLayout, store_heads
from engine.kernels.kv_write import kv_write
from engine.kernels.latent_attention import latent_attention
from engine.kernels.paged_attention import MAX_COUNTERS, paged_attention
from engine.kv_spec import KVGroupSpec


@dataclass(frozen=True)
class _GroupMetadata:
    inputs: AttentionInputs
    index: int
    window: int | None
    value_size: int | None
    max_query_len: int
    max_seq_len: int


class TritonAttentionBackend(AttentionBackend):
    """All requests of a step in one launch per layer, whatever their query lengths."""

    is_capturable: ClassVar[bool] = True
    is_exact: ClassVar[bool] = True

    _counters: torch.Tensor | None = None  # of `paged_attention`, whose launches follow one another

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        return device.type == "cuda" or knobs.runtime.interpret

    def prepare(self, inputs: AttentionInputs, groups: Sequence[KVGroupSpec]) -> list[Any]:
        max_query_len, max_seq_len = max(inputs.query_lens), max(inputs.max_seq_lens)
        if self._counters is None:  # the first step is not captured, so this stays
            self._counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=inputs.positions.device)
        return [
            _GroupMetadata(inputs, index, group.window, group.value_size, max_query_len, max_seq_len)
            for index, group in enumerate(groups)
        ]

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor | None, cache: LayerKVCache, metadata: Any
    ) -> None:
        slots = metadata.inputs.slot_mappings[metadata.index]
        if value is None:  # the same bytes to the same place: cheaper than a kernel of its own
            kv_write(key, key, cache.key, cache.key, slots)
        else:
            kv_write(key, value, cache.key, cache.value, slots)

    def store_heads(
        self,
        heads: torch.Tensor,
        layout: HeadLayout,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: LayerKVCache,
        metadata: Any,
    ) -> torch.Tensor:
        if not heads.is_cuda:  # in the interpreter, operations of torch are faster
            return super().store_heads(heads, layout, rotation, cache, metadata)
        slots = metadata.inputs.slot_mappings[metadata.index]
        return store_heads(heads, layout, *rotation, cache.key, cache.value, slots)

    def attend(self, query: torch.Tensor, cache: LayerKVCache, metadata: Any, scale: float) -> torch.Tensor:
        inputs: AttentionInputs = metadata.inputs
        request_inputs = (
            inputs.block_tables[metadata.index],
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.positions,
        )
        bounds = {"max_query_len": metadata.max_query_len, "max_seq_len": metadata.max_seq_len}
        if metadata.value_size is not None:
            return latent_attention(
                query, cache.key, *request_inputs, value_size=metadata.value_size, scale=scale, **bounds
            )
        return paged_attention(
            query,
            cache.key,
            cache.value,
            *request_inputs,
            scale=scale,
            window=metadata.window,
            counters=self._counters,
            **bounds,
        )
