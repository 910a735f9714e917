"""Request rows: the fixed slots of device state that running requests own.

A step gathers its batch from rows by `idx_mapping`. Draft tokens stand in the history right behind the confirmed
tokens, so position p of any scheduled token, prompt, last sampled or draft, is `token_history[row, p]`, and the
tokens before a drawn position p are `token_history[row, :p]`, accepted drafts of the same run included.
Example: prompt [5, 6], output [7], drafts [8, 9]: history [5, 6, 7, 8, 9], num_tokens 3, num_drafts 2,
num_computed_tokens 2; the verification reads positions 2, 3, 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.device import to_device
from engine.kernels.emit_runs import write_tokens_reference
from engine.step import NewRow


class RequestRows:
    """All tensors are indexed by row. Capacity of the history: max_model_len + max_drafts + 1 tokens."""

    def __init__(self, max_num_rows: int, max_model_len: int, max_drafts: int, device: torch.device) -> None:
        self.max_num_rows = max_num_rows
        self.max_drafts = max_drafts
        self.device = device
        capacity = max_model_len + max_drafts + 1

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.token_history = zeros(max_num_rows, capacity)  # [rows, capacity] int32
        self.num_prompt_tokens = zeros(max_num_rows)  # [rows] int32
        self.num_tokens = zeros(max_num_rows)  # [rows] int32; prompt + emitted, on the device's knowledge
        self.num_computed_tokens = zeros(max_num_rows)  # [rows] int32; tokens whose KV is valid
        self.num_drafts = zeros(max_num_rows)  # [rows] int32; valid drafts behind num_tokens
        self.token_limit = zeros(max_num_rows)  # [rows] int32; positions >= this write no KV

    def set_row(self, new: NewRow) -> None:
        """Fill a row from host data (asynchronous copies from pinned memory on CUDA)."""
        row = new.row
        tokens = to_device(np.array(new.token_ids, dtype=np.int32), self.device)
        self.token_history[row, : len(new.token_ids)].copy_(tokens)
        self.num_prompt_tokens[row].fill_(new.num_prompt_tokens)
        self.num_tokens[row].fill_(len(new.token_ids))
        self.num_computed_tokens[row].fill_(new.num_computed_tokens)
        self.num_drafts[row].fill_(0)
        self.token_limit[row].fill_(new.token_limit)

    def set_drafts(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Drafts made on the host, by row, behind the confirmed tokens. No step of these rows is in flight."""
        if not drafts:
            return
        lengths = np.array([len(token_ids) for token_ids in drafts.values()], dtype=np.int64)
        padded = np.zeros((len(drafts), int(lengths.max())), dtype=np.int64)
        for line, token_ids in zip(padded, drafts.values(), strict=True):
            line[: len(token_ids)] = token_ids
        rows = to_device(np.array(list(drafts), dtype=np.int64), self.device)
        counts = to_device(lengths, self.device)
        self.write_tokens(rows, self.num_tokens[rows].to(torch.int64), to_device(padded, self.device), counts)
        self.num_drafts[rows] = counts.to(torch.int32)

    def write_tokens(
        self, row_ids: torch.Tensor, first: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """token_history[row, first + j] = token_ids[:, j] for j < counts; the rest of the history stays.

        row_ids, first, counts: [num_reqs] int64, rows distinct; token_ids: [num_reqs, width] int64.
        """
        write_tokens_reference(self.token_history, row_ids, first, token_ids, counts)
