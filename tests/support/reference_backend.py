"""Attention by its definition, from what the step's tensors say. The host's bounds, which kernels rely on, are checked:
a captured step keeps those that it was captured with, however long its requests have become.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.metadata import LayerKVCache
from engine.attention.triton_backend import TritonAttentionBackend
from engine.kernels.attention_reference import paged_attention_reference
from engine.kernels.kv_write import kv_write_reference
from engine.kernels.latent_attention import latent_attention_reference


class ReferenceBackend(TritonAttentionBackend):
    """Much faster on a CPU than kernels in the interpreter."""

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor | None, cache: LayerKVCache, metadata: Any
    ) -> None:
        slots = metadata.inputs.slot_mappings[metadata.index]
        if value is None:
            kv_write_reference(key, key, cache.key, cache.key, slots)
        else:
            kv_write_reference(key, value, cache.key, cache.value, slots)

    def attend(self, query: torch.Tensor, cache: LayerKVCache, metadata: Any, scale: float) -> torch.Tensor:
        inputs = metadata.inputs
        assert int(inputs.seq_lens.max()) <= metadata.max_seq_len
        assert int(inputs.query_start_loc.diff().max()) <= metadata.max_query_len
        step = (
            inputs.block_tables[metadata.index],
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.positions,
        )
        if metadata.value_size is not None:
            return latent_attention_reference(
                query, cache.key, *step, value_size=metadata.value_size, scale=scale
            )
        return paged_attention_reference(
            query, cache.key, cache.value, *step, scale=scale, window=metadata.window
        )
