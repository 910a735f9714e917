"""Paged attention in exact numerics: the Triton backend with a kernel whose sums have one order."""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.metadata import AttentionInputs, LayerKVCache
from engine.attention.triton_backend import TritonAttentionBackend
from engine.kernels.exact_attention import exact_attention


class ExactAttentionBackend(TritonAttentionBackend):
    """A token's result depends on its own keys only."""

    def attend(self, query: torch.Tensor, cache: LayerKVCache, metadata: Any, scale: float) -> torch.Tensor:
        assert metadata.value_size is None, "latent caches have no exact form"
        inputs: AttentionInputs = metadata.inputs
        return exact_attention(
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
            counters=self._counters,
        )
