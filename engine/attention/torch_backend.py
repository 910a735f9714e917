"""Paged attention in plain torch: the CPU path, and the oracle that kernels are tested against.

Keys and values are gathered by slot, then torch's scaled_dot_product_attention does the work. Requests with
few query tokens share one call; a longer chunk gets a call of its own. What a step needs is built once in
`prepare`: a layer costs two gathers and one attention call for each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionInputs, LayerKVCache
from engine.device import to_device
from engine.kv_spec import PAD_SLOT_ID, KVGroupSpec

MAX_SHARED_QUERY_LEN = 32  # tokens; longer chunks are attended one by one
MIN_LENGTH_CLASS = 256  # keys; shorter requests share a call whatever their lengths


@dataclass(frozen=True)
class _Batch:
    """Requests of one query_len whose keys are gathered together, padded to the same number."""

    tokens: slice | torch.Tensor  # of the step; when they are scattered: [num_reqs * query_len] int64
    num_reqs: int
    query_len: int
    slots: torch.Tensor  # [num_reqs * num_keys] int64
    mask: torch.Tensor | None  # [num_reqs, query_len, num_keys] bool, True: is seen; None: plain causal


@dataclass(frozen=True, kw_only=True)
class _Writes:
    """Which of the step's tokens are stored where."""

    slots: torch.Tensor  # [n] int64
    rows: torch.Tensor | None = None  # [n] int64, tokens to store; None: all, in order
    is_stored: torch.Tensor | None = None  # [n, 1, 1] bool, False: the slot keeps what it has; None: all are


@dataclass(frozen=True)
class _GroupMetadata:
    batches: list[_Batch]
    writes: _Writes


class TorchAttentionBackend(AttentionBackend):
    """Works on any device and floating dtype."""

    def prepare(self, inputs: AttentionInputs, groups: Sequence[KVGroupSpec]) -> list[Any]:
        members = _share_calls(inputs.query_lens, inputs.max_seq_lens)
        return [
            _GroupMetadata(
                [_build_batch(inputs, requests, index, group.window) for requests in members],
                _build_writes(inputs.slot_mappings[index]),
            )
            for index, group in enumerate(groups)
        ]

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor | None, cache: LayerKVCache, metadata: Any
    ) -> None:
        writes: _Writes = metadata.writes
        pairs = [(key, cache.key)] if value is None else [(key, cache.key), (value, cache.value)]
        for source, target in pairs:
            flat = target.flatten(0, 1)  # [num_slots, num_kv_heads, head_size]
            if writes.rows is not None:
                source = source.index_select(0, writes.rows)
            if writes.is_stored is not None:
                source = torch.where(writes.is_stored, source, flat.index_select(0, writes.slots))
            flat.index_copy_(0, writes.slots, source)

    def attend(self, query: torch.Tensor, cache: LayerKVCache, metadata: Any, scale: float) -> torch.Tensor:
        batches: list[_Batch] = metadata.batches
        if len(batches) == 1:
            return _attend_batch(query, cache, batches[0], scale)
        shape = (*query.shape[:-1], cache.value.shape[-1])
        output = torch.empty(shape, dtype=query.dtype, device=query.device)
        for batch in batches:
            output[batch.tokens] = _attend_batch(query[batch.tokens], cache, batch, scale)
        return output


def _share_calls(query_lens: Sequence[int], max_seq_lens: Sequence[int]) -> list[list[int]]:
    """Request indices by attention call. Lengths in one differ by less than a factor of two: padding costs.

    Example: query_lens [1, 3, 1, 1, 90], max_seq_lens [20, 20, 50, 900, 90] -> [[0, 2], [1], [3], [4]].
    """
    calls: dict[tuple[int, ...], list[int]] = {}
    for request, (query_len, max_seq_len) in enumerate(zip(query_lens, max_seq_lens, strict=True)):
        if query_len > MAX_SHARED_QUERY_LEN:
            key: tuple[int, ...] = (query_len, 0, request)
        else:
            key = (query_len, max(max_seq_len, MIN_LENGTH_CLASS - 1).bit_length())
        calls.setdefault(key, []).append(request)
    return list(calls.values())


def _build_batch(inputs: AttentionInputs, requests: list[int], group: int, window: int | None) -> _Batch:
    """Slots and mask of the requests' keys.

    Key positions run from the first key that the first query sees. Those behind a request's last key
    (padding, and slots that were never written) read the last key instead, and are masked: no other
    request's data is touched.
    Example: seq_lens [2, 4], query_len 1, window None: slots of positions [0, 1, 1, 1], [0, 1, 2, 3].
    """
    query_len = inputs.query_lens[requests[0]]
    num_keys = max(inputs.max_seq_lens[request] for request in requests)
    if window is not None:
        num_keys = min(num_keys, window + query_len - 1)
    rows, tokens = _select(inputs, requests)
    last_keys = (inputs.seq_lens[rows].to(torch.int64) - 1).clamp(min=0)[:, None]  # [num_reqs, 1]
    keys = torch.arange(num_keys, device=last_keys.device)[None]  # [1 or num_reqs, num_keys]
    if window is not None:
        keys = keys + (last_keys - (query_len - 1) - (window - 1)).clamp(min=0)

    table = inputs.block_tables[group][rows]  # [num_reqs, max_blocks] int32
    stored = torch.minimum(keys, last_keys)
    # Rows of speculation beyond the token limit may lie behind the table; what they get is never used.
    blocks = (stored // inputs.block_size).clamp(max=table.shape[1] - 1)
    slots = table.gather(1, blocks).to(torch.int64) * inputs.block_size + stored % inputs.block_size

    mask = None
    is_first_chunk = query_len > MAX_SHARED_QUERY_LEN and num_keys == query_len
    if not is_first_chunk or (window is not None and window < query_len):
        # Never behind the last key: every row sees at least that one, so softmax has no empty row.
        positions = inputs.positions[tokens].view(len(requests), query_len)
        queries = torch.minimum(positions, last_keys)[:, :, None]
        mask = keys[:, None] <= queries
        if window is not None:
            mask &= keys[:, None] > queries - window
    return _Batch(tokens, len(requests), query_len, slots.clamp(min=0).flatten(), mask)


def _select(
    inputs: AttentionInputs, requests: list[int]
) -> tuple[slice | torch.Tensor, slice | torch.Tensor]:
    """Indices of the requests and of their tokens: slices (views, no copies) when they follow one another."""
    starts = [0, *accumulate(inputs.query_lens)]
    first, last = requests[0], requests[-1]
    if last - first + 1 == len(requests):
        return slice(first, last + 1), slice(starts[first], starts[last + 1])
    query_len = inputs.query_lens[first]
    tokens = [starts[request] + offset for request in requests for offset in range(query_len)]
    device = inputs.positions.device
    return to_device(np.array(requests), device), to_device(np.array(tokens), device)


def _build_writes(slot_mapping: torch.Tensor) -> _Writes:
    """Leave out the tokens of PAD_SLOT_ID. slot_mapping: [num_tokens] int64."""
    # On CPU the host reads the tensor without waiting for anything.
    return _drop_padding(slot_mapping) if slot_mapping.is_cpu else _redirect_padding(slot_mapping)


def _drop_padding(slot_mapping: torch.Tensor) -> _Writes:
    is_real = slot_mapping != PAD_SLOT_ID
    if bool(is_real.all()):  # sync: host memory
        return _Writes(slots=slot_mapping)
    rows = is_real.nonzero().flatten()
    return _Writes(slots=slot_mapping[rows], rows=rows)


def _redirect_padding(slot_mapping: torch.Tensor) -> _Writes:
    """Without knowing how many tokens are padding: those store the first real token once more, or, when there
    is none, what slot 0 holds already. Example: slots [-1, 7, 9] -> rows [1, 1, 2] to slots [7, 7, 9].
    """
    is_real = slot_mapping != PAD_SLOT_ID
    tokens = torch.arange(len(slot_mapping), device=slot_mapping.device)
    rows = torch.where(is_real, tokens, is_real.to(torch.int32).argmax())
    return _Writes(slots=slot_mapping[rows].clamp(min=0), rows=rows, is_stored=is_real[rows][:, None, None])


def _attend_batch(query: torch.Tensor, cache: LayerKVCache, batch: _Batch, scale: float) -> torch.Tensor:
    """query: [num_reqs * query_len, num_heads, head_size]; returns the same shape, as wide as the values."""
    num_kv_heads, head_size = cache.key.shape[2:]
    key, value = (
        part.flatten(0, 1)
        .index_select(0, batch.slots)
        .view(batch.num_reqs, -1, num_kv_heads, part.shape[-1])
        .transpose(1, 2)
        for part in (cache.key, cache.value)
    )
    grouped = query.view(batch.num_reqs, batch.query_len, num_kv_heads, -1, head_size)
    if batch.query_len > MAX_SHARED_QUERY_LEN:
        return _attend_chunk(grouped[0], key, value, batch.mask, scale)
    assert batch.mask is not None
    return _attend_shared(grouped, key, value, batch.mask, scale)


def _attend_shared(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """All query rows of a KV head, of every head in its group, are the rows of one small matrix.

    query: [num_reqs, query_len, num_kv_heads, group, head_size]; key, value: [num_reqs, num_kv_heads,
    num_keys, head_size or value_size]; mask: [num_reqs, query_len, num_keys] bool. Returns [num_reqs * query_len,
    num_heads, value_size].
    """
    num_reqs, query_len, num_kv_heads, group, head_size = query.shape
    rows = query.permute(0, 2, 3, 1, 4).reshape(num_reqs, num_kv_heads, group * query_len, head_size)
    mask = mask[:, None, None].expand(-1, 1, group, -1, -1).reshape(num_reqs, 1, group * query_len, -1)
    output = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    output = output.view(num_reqs, num_kv_heads, group, query_len, -1).permute(0, 3, 1, 2, 4)
    return output.reshape(num_reqs * query_len, num_kv_heads * group, -1)


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """One request's chunk. The head group is the batch dimension, over which K and V are views, not copies.

    query: [query_len, num_kv_heads, group, head_size]; key, value: [1, num_kv_heads, num_keys, head_size or
    value_size]; mask: [1, query_len, num_keys] bool, or None for plain causal. Returns [query_len, num_heads,
    value_size].
    """
    query_len, num_kv_heads, group, _ = query.shape
    output = F.scaled_dot_product_attention(
        query.permute(2, 1, 0, 3),
        key.expand(group, -1, -1, -1),
        value.expand(group, -1, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return output.permute(2, 1, 0, 3).reshape(query_len, num_kv_heads * group, -1)
