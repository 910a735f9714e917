"""A step's attention inputs in buffers that stay where they are, so that a captured forward pass can read them."""

from __future__ import annotations

import torch

from engine.attention.metadata import AttentionInputs
from engine.kv_spec import PAD_SLOT_ID


class StaticAttentionInputs:
    """Buffers at the largest shape; smaller shapes are their leading parts. What pads a batch: requests of length 0
    behind the batch's, tokens that store nothing behind its tokens."""

    def __init__(
        self,
        *,
        num_groups: int,
        block_size: int,
        max_blocks: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._max_context = max_context
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._query_start_loc = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._block_tables = [
            torch.zeros(max_num_reqs, max_blocks, dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self._slot_mappings = [torch.full_like(self._positions, PAD_SLOT_ID) for _ in range(num_groups)]

    def fill(self, inputs: AttentionInputs, *, num_tokens: int, num_reqs: int) -> None:
        """Copy a batch in, padded to this shape. Of its KV groups, the first ones are taken."""
        own_tokens, own_reqs = len(inputs.positions), inputs.num_reqs
        self._positions[:own_tokens].copy_(inputs.positions)
        self._query_start_loc[: own_reqs + 1].copy_(inputs.query_start_loc)
        self._query_start_loc[own_reqs + 1 : num_reqs + 1].fill_(own_tokens)
        self._seq_lens[:own_reqs].copy_(inputs.seq_lens)
        self._seq_lens[own_reqs:num_reqs].zero_()
        for group, slots in enumerate(self._slot_mappings):
            self._block_tables[group][:own_reqs].copy_(inputs.block_tables[group])
            slots[:own_tokens].copy_(inputs.slot_mappings[group])
            slots[own_tokens:num_tokens].fill_(PAD_SLOT_ID)

    def clear(self) -> None:
        """A batch of nobody."""
        self._query_start_loc.zero_()
        self._seq_lens.zero_()
        for slots in self._slot_mappings:
            slots.fill_(PAD_SLOT_ID)

    def view(self, *, num_tokens: int, num_reqs: int, max_query_len: int) -> AttentionInputs:
        """The buffers as a step of this shape. Lengths on the host are bounds, and hold for every batch in it."""
        return AttentionInputs(
            query_lens=[max_query_len] * num_reqs,
            max_seq_lens=[self._max_context] * num_reqs,
            query_start_loc=self._query_start_loc[: num_reqs + 1],
            seq_lens=self._seq_lens[:num_reqs],
            positions=self._positions[:num_tokens],
            block_tables=tuple(table[:num_reqs] for table in self._block_tables),
            slot_mappings=tuple(slots[:num_tokens] for slots in self._slot_mappings),
            block_size=self._block_size,
            is_captured=True,
        )
