"""Paged attention by our Triton kernels; engine/attention/torch_backend.py is its oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionInputs, LayerKVCache
from engine.kernels.kv_write import kv_write
from engine.kernels.paged_attention import paged_attention
from engine.kv_spec import KVGroupSpec


@dataclass(frozen=True)
class _GroupMetadata:
    inputs: AttentionInputs
    index: int
    window: int | None
    max_query_len: int
    max_seq_len: int


class TritonAttentionBackend(AttentionBackend):
    """All requests of a step in one launch per layer, whatever their query lengths."""

    is_capturable: ClassVar[bool] = True

    def prepare(self, inputs: AttentionInputs, groups: Sequence[KVGroupSpec]) -> list[Any]:
        max_query_len, max_seq_len = max(inputs.query_lens), max(inputs.max_seq_lens)
        return [
            _GroupMetadata(inputs, index, group.window, max_query_len, max_seq_len)
            for index, group in enumerate(groups)
        ]

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: LayerKVCache, metadata: Any) -> None:
        kv_write(key, value, cache.key, cache.value, metadata.inputs.slot_mappings[metadata.index])

    def attend(self, query: torch.Tensor, cache: LayerKVCache, metadata: Any, scale: float) -> torch.Tensor:
        inputs: AttentionInputs = metadata.inputs
        return paged_attention(
            query,
            cache.key,
            cache.value,
            inputs.block_tables[metadata.index],
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.positions,
            scale=scale,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            window=metadata.window,
        )
