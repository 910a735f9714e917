"""What attention must know about one step, per KV group; built once a step, read by every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.device import to_device
from engine.kv_spec import KVGroupSpec


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
    seq_lens: (
        torch.Tensor
    )  # [num_reqs] int32; keys: computed + scheduled tokens, none at or behind the token limit
    positions: torch.Tensor  # [num_tokens] int64
    block_tables: tuple[torch.Tensor, ...]  # per KV group: [num_reqs, max_blocks] int32
    slot_mappings: tuple[torch.Tensor, ...]  # per KV group: [num_tokens] int64; PAD_SLOT_ID writes nowhere
    block_size: int
    is_captured: bool = (
        False  # lengths on the host bound any batch of this shape; none of them is a batch's own
    )

    @property
    def num_reqs(self) -> int:
        return len(self.query_lens)

    def last_tokens(self, needed: NeededTokens) -> AttentionInputs:
        """The step of the needed tokens alone; requests without any are left out. They see the same keys as before."""
        requests = [request for request, count in enumerate(needed.counts) if count]
        counts = np.array([needed.counts[request] for request in requests], dtype=np.int64)
        device = self.positions.device
        index = to_device(np.array(requests, dtype=np.int64), device)
        starts = to_device(np.concatenate(([0], np.cumsum(counts))).astype(np.int32), device)
        return AttentionInputs(
            query_lens=counts.tolist(),
            max_seq_lens=[self.max_seq_lens[request] for request in requests],
            query_start_loc=starts,
            seq_lens=self.seq_lens[index],
            positions=self.positions[needed.tokens],
            block_tables=tuple(table[index] for table in self.block_tables),
            slot_mappings=tuple(slots[needed.tokens] for slots in self.slot_mappings),
            block_size=self.block_size,
        )

    def select(self, requests: list[int], index: torch.Tensor, tokens: torch.Tensor) -> AttentionInputs:
        """The same for some of the requests, by ascending batch index.

        index: `requests` on the device, [n] int64; tokens: [num_tokens of these] int64.
        """
        lens = torch.diff(self.query_start_loc)[index]
        return AttentionInputs(
            query_lens=[self.query_lens[request] for request in requests],
            max_seq_lens=[self.max_seq_lens[request] for request in requests],
            query_start_loc=F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=self.seq_lens[index],
            positions=self.positions[tokens],
            block_tables=tuple(table[index] for table in self.block_tables),
            slot_mappings=tuple(slots[tokens] for slots in self.slot_mappings),
            block_size=self.block_size,
        )


@dataclass(frozen=True, kw_only=True)
class NeededTokens:
    """The last `counts[i]` tokens of each request; tokens: their indices in the step."""

    counts: list[int]  # by request; 0: none of its tokens
    tokens: torch.Tensor  # [sum of counts] int64

    def spread(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Their rows, [sum of counts, size], among those of all tokens: [num_tokens, size]; others hold anything."""
        return rows.new_empty(num_tokens, rows.shape[1]).index_copy_(0, self.tokens, rows)


@dataclass(frozen=True)
class LayerKVCache:
    """K and V of one layer: [num_blocks, block_size, num_kv_heads, head_size] each.

    Of a group with a `value_size`, V is a view of K's first features, and as wide.
    """

    key: torch.Tensor
    value: torch.Tensor

    @staticmethod
    def of_group(group: KVGroupSpec, make: Callable[[], torch.Tensor]) -> LayerKVCache:
        """`make`: a new tensor of K's shape."""
        key = make()
        return LayerKVCache(key, make() if group.value_size is None else key[..., : group.value_size])
