"""The tensors of request rows that the kernels of a step's bookkeeping read and write."""

from __future__ import annotations

from typing import Protocol

import torch


class RowState(Protocol):
    """By request row; all int32. See engine/batch/request_rows.py."""

    token_history: torch.Tensor  # [rows, capacity]; drafts stand behind the known tokens
    num_tokens: torch.Tensor  # [rows]
    num_computed_tokens: torch.Tensor  # [rows]
    num_drafts: torch.Tensor  # [rows]
    token_limit: torch.Tensor  # [rows]
