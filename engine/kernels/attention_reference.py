"""What `paged_attention` computes, by its definition."""

from __future__ import annotations

import torch


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """By the definition, request by request, in the dtype of the inputs (float64 for an oracle). Syncs."""
    output = torch.zeros_like(query)
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, end = starts[request], starts[request + 1]
        keys = torch.arange(seq_len, device=query.device)
        blocks, offsets = block_table[request].long()[keys // block_size], keys % block_size
        key = key_cache[blocks, offsets].repeat_interleave(group, dim=1)  # [seq_len, num_heads, head_size]
        value = value_cache[blocks, offsets].repeat_interleave(group, dim=1)
        rows = positions[first:end, None]
        seen = keys <= rows
        if window is not None:
            seen &= keys > rows - window
        scores = torch.einsum("qhd,khd->hqk", query[first:end], key) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        output[first:end] = torch.einsum("hqk,khd->qhd", weights, value)
    return output
