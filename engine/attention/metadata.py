"""What attention must know about one step, per KV group; built once a step, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """The ragged batch of a step. Requests are in plan order: decodes (1 + k query tokens) first, then chunks.

    `query_lens` and `max_seq_lens` are host values (the latter an upper bound, since accepted tokens of the step
    before may not be known yet); tensors hold the truth. Example, two requests with query_lens [3, 2]:
    query_start_loc [0, 3, 5]; request 0 with 7 computed tokens: seq_lens[0] = 10, positions [7, 8, 9, ...].
    """

    query_lens: list[int]
    max_seq_lens: list[int]
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32; computed + scheduled tokens
    positions: torch.Tensor  # [num_tokens] int64
    block_tables: tuple[torch.Tensor, ...]  # per KV group: [num_reqs, max_blocks] int32
    slot_mappings: tuple[torch.Tensor, ...]  # per KV group: [num_tokens] int64; PAD_SLOT_ID writes nowhere
    block_size: int

    @property
    def num_reqs(self) -> int:
        return len(self.query_lens)


@dataclass(frozen=True)
class LayerKVCache:
    """K and V of one layer: [num_blocks, block_size, num_kv_heads, head_size] each."""

    key: torch.Tensor
    value: torch.Tensor
