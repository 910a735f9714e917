"""Attention over whole training rows: the documents of a row see their own past and nothing else.

A frozen target runs by the engine's own model, on a backend that lends it this attention: in training it computes what
it computes in service, and hands out what drafters read, inputs of layers, keys and values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.attention.backend import AttentionBackend, AttentionContext
from engine.attention.metadata import AttentionInputs, LayerKVCache
from engine.kv_spec import KVGroupSpec
from engine.models.base import CausalLM
from tools.train.rows import Batch

KeysValues = tuple[torch.Tensor, torch.Tensor]  # [num_tokens, num_kv_heads, head_size] each


def visible_keys(batch: Batch, window: int | None = None) -> torch.Tensor:
    """[num_rows, row_length, row_length] bool: may query (dim 1) see key (dim 2)? `window`: keys, itself included."""
    index = torch.arange(batch.positions.shape[1], device=batch.positions.device)
    is_past = index <= index[:, None]
    if window is not None:
        is_past = is_past & (index > index[:, None] - window)
    visible: torch.Tensor = is_past & (index >= batch.starts[:, :, None])
    return visible


def as_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, queries, keys] bool -> what attention scores are added to, [num_rows, 1, queries, keys]."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, float("-inf"))[:, None]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """query: [num_tokens, num_heads, head_size] of all rows; key, value: those of all keys, row by row.

    Returns [num_tokens, num_heads * head_size].
    """
    num_rows, num_heads = len(bias), query.shape[1]

    def by_row(x: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_heads, per row, head_size]"""
        heads: torch.Tensor = x.reshape(num_rows, -1, *x.shape[1:]).transpose(1, 2)
        repeats = num_heads // heads.shape[1]
        if repeats == 1:
            return heads
        return heads[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2)

    mixed: torch.Tensor = F.scaled_dot_product_attention(
        by_row(query), by_row(key), by_row(value), attn_mask=bias, scale=scale
    )
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def fused_attention(device: torch.device) -> AbstractContextManager[None]:
    """Within it, attention on an accelerator never builds its scores in memory."""
    if device.type == "cpu":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class RowBackend(AttentionBackend):
    """Lends attention over rows to an engine model: row r is a request that has block r to itself."""

    def __init__(self, batch: Batch, dtype: torch.dtype) -> None:
        self._batch = batch
        self._dtype = dtype

    def prepare(self, inputs: AttentionInputs, groups: Sequence[KVGroupSpec]) -> list[torch.Tensor]:
        biases: dict[int | None, torch.Tensor] = {}
        for group in groups:
            if group.window not in biases:
                biases[group.window] = as_bias(visible_keys(self._batch, group.window), self._dtype)
        return [biases[group.window] for group in groups]

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor | None, cache: LayerKVCache, metadata: torch.Tensor
    ) -> None:
        assert value is not None, "values that are a part of the keys"
        cache.key.view(key.shape).copy_(key)
        cache.value.view(value.shape).copy_(value)

    def attend(
        self, query: torch.Tensor, cache: LayerKVCache, metadata: torch.Tensor, scale: float
    ) -> torch.Tensor:
        key, value = cache.key.flatten(0, 1), cache.value.flatten(0, 1)
        return attend(query, key, value, metadata, scale).view_as(query)


@dataclass(frozen=True)
class TargetRun:
    """What a frozen target makes of a batch. num_tokens = num_rows * row_length."""

    hidden: torch.Tensor  # [num_tokens, hidden_size], after the final norm
    aux: Mapping[int, torch.Tensor]  # by layer, its input: [num_tokens, hidden_size]
    keys_values: Mapping[int, KeysValues]


@torch.no_grad()
def run_target(model: CausalLM, batch: Batch, aux_layers: Collection[int] = ()) -> TargetRun:
    """One pass over whole rows, by the engine's own model."""
    token_ids, positions = batch.token_ids.flatten(), batch.positions.flatten()
    dtype, groups = model.embed(token_ids[:1]).dtype, model.kv_groups()
    num_rows, row_length = batch.token_ids.shape
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=token_ids.device)
    inputs = AttentionInputs(
        query_lens=[row_length] * num_rows,
        max_seq_lens=[row_length] * num_rows,
        query_start_loc=rows * row_length,
        seq_lens=torch.full_like(rows[1:], row_length),
        positions=positions,
        block_tables=tuple(rows[:-1, None] for _ in groups),
        slot_mappings=tuple(torch.arange(len(token_ids), device=token_ids.device) for _ in groups),
        block_size=row_length,
    )
    caches = {
        layer: LayerKVCache(*(torch.empty(shape, dtype=dtype, device=token_ids.device) for _ in range(2)))
        for group in groups
        for shape in [(num_rows, row_length, group.num_kv_heads, group.head_size)]
        for layer in group.layer_indices
    }
    context = AttentionContext(RowBackend(batch, dtype), inputs, groups, caches, aux_layers)
    hidden = model(token_ids, positions, context)
    keys_values = {
        layer: (cache.key.flatten(0, 1), cache.value.flatten(0, 1)) for layer, cache in caches.items()
    }
    return TargetRun(hidden, context.aux_hidden_states, keys_values)
