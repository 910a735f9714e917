"""Block tables on the device: for each KV group, the block ids of every request row.

The scheduler decides which blocks a request owns; this file only mirrors its updates. Entries never written keep an
older id or 0: nobody reads them, since positions stay below the row's token limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.device import to_device
from engine.kernels.step_inputs import slots_of
from engine.step import BlockTableUpdate


class BlockTables:
    """stacked: [num_groups, max_num_rows, max_blocks] int32; tables: the same by group."""

    def __init__(
        self, num_groups: int, max_num_rows: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.stacked = torch.zeros(
            num_groups, max_num_rows, self.max_blocks, dtype=torch.int32, device=device
        )
        self.tables = self.stacked.unbind()
        self._max_num_rows = max_num_rows
        self._device = device

    def apply(self, updates: Sequence[BlockTableUpdate]) -> None:
        """Write all updates of a step: one copy and one scatter. No two of them are of one entry."""
        indices: list[int] = []
        values: list[int] = []
        for update in updates:
            table = update.group * self._max_num_rows + update.row
            first = table * self.max_blocks + update.start
            indices.extend(range(first, first + len(update.block_ids)))
            values.extend(update.block_ids)
        if indices:
            packed = to_device(np.array([indices, values], dtype=np.int64), self._device)
            self.stacked.view(-1).index_copy_(0, packed[0], packed[1].to(torch.int32))

    def slot_mapping(
        self, group: int, rows: torch.Tensor, positions: torch.Tensor, limits: torch.Tensor
    ) -> torch.Tensor:
        """Slots of tokens. rows, positions, limits: [num_tokens] int64; returns [num_tokens] int64.

        Example, block_size 4, table of the row [7, 2]: position 5 -> block index 1 -> block 2 -> slot 2 * 4 + 1 = 9.
        Positions at or beyond the row's limit get PAD_SLOT_ID: what they would store can never be emitted.
        """
        return slots_of(self.tables[group], rows, positions, limits, self.block_size)
