"""Request rows: the fixed slots of device state that running requests own.

A step gathers its batch from rows by `idx_mapping`. Draft tokens stand in the history right behind the confirmed
tokens, so position p of any scheduled token, prompt, last sampled or draft, is `token_history[row, p]`, and the
tokens before a drawn position p are `token_history[row, :p]`, accepted drafts of the same run included.
Example: prompt [5, 6], output [7], drafts [8, 9]: history [5, 6, 7, 8, 9], num_tokens 3, num_drafts 2,
num_computed_tokens 2; the verification reads positions 2, 3, 4.
"""

from __future__ import annotations

import torch

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
        tokens = torch.tensor(new.token_ids, dtype=torch.int32)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        self.token_history[row, : len(new.token_ids)].copy_(tokens, non_blocking=True)
        self.num_prompt_tokens[row].fill_(new.num_prompt_tokens)
        self.num_tokens[row].fill_(len(new.token_ids))
        self.num_computed_tokens[row].fill_(new.num_computed_tokens)
        self.num_drafts[row].fill_(0)
        self.token_limit[row].fill_(new.token_limit)
