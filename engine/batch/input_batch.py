"""The gathered batch of one step: what the plan says on the host, joined with what only the rows know.

Host knowledge (which rows, how many tokens, which logits rows) is packed into one array and one copy; positions,
lengths, slots and input ids are derived on the device, because the number of tokens accepted by the step before may
not be known on the host yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.metadata import AttentionInputs
from engine.batch.block_tables import BlockTables
from engine.batch.buffers import to_device
from engine.batch.request_rows import RequestRows
from engine.step import ScheduledRequest


@dataclass(frozen=True, kw_only=True)
class InputBatch:
    """Example: a decode with 2 drafts (row 4, 10 tokens computed) and the last chunk of a prompt (row 1, positions
    8, 9): query_lens [3, 2], query_start_loc [0, 3, 5], positions [10, 11, 12, 8, 9], seq_lens [13, 10];
    logits are needed of tokens [0, 1, 2, 4]: logits_start [0, 3, 4], drawn positions [11, 12, 13, 10].
    """

    scheduled: Sequence[ScheduledRequest]
    row_list: list[int]  # rows of `scheduled`, on the host
    rows: torch.Tensor  # [num_reqs] int64; idx_mapping
    starts: torch.Tensor  # [num_reqs] int64; first position of each request
    query_lens: torch.Tensor  # [num_reqs] int64; scheduled tokens
    is_prefill: torch.Tensor  # [num_reqs] bool
    num_drafts: torch.Tensor  # [num_reqs] int64; valid drafts to verify
    max_drafts: int  # largest number of planned drafts in the batch
    input_ids: torch.Tensor  # [num_tokens] int64
    logits_indices: torch.Tensor  # [num_logits] int64; token index of each logits row
    logits_start: torch.Tensor  # [num_reqs + 1] int64; first logits row of each request
    logits_reqs: torch.Tensor  # [num_logits] int64; batch index
    logits_rows: torch.Tensor  # [num_logits] int64; request row
    logits_positions: torch.Tensor  # [num_logits] int64; position of the token to draw
    logits_row_list: list[int]  # `logits_rows` on the host
    attention: AttentionInputs

    @property
    def num_reqs(self) -> int:
        return len(self.row_list)


def gather_batch(
    scheduled: Sequence[ScheduledRequest], rows: RequestRows, block_tables: BlockTables
) -> InputBatch:
    """Build the batch of a plan's `scheduled` list. No host sync."""
    device = rows.device
    query_lens = [entry.num_tokens for entry in scheduled]
    num_logits = [1 + entry.num_drafts if entry.samples else 0 for entry in scheduled]
    row_list = [entry.row for entry in scheduled]
    num_reqs = len(scheduled)

    lens = np.array(query_lens, dtype=np.int64)
    logits_lens = np.array(num_logits, dtype=np.int64)
    query_start = _exclusive_cumsum(lens)
    logits_start = _exclusive_cumsum(logits_lens)
    req_of_token = np.repeat(np.arange(num_reqs), lens)
    req_of_logit = np.repeat(np.arange(num_reqs), logits_lens)
    # A request's logits rows are its last ones: token index = end of its tokens - its number of logits + j.
    logits_indices = (
        (query_start[1:] - logits_lens)[req_of_logit]
        + np.arange(len(req_of_logit))
        - logits_start[req_of_logit]
    )
    host = [
        np.array(row_list, dtype=np.int64),
        np.array([entry.start for entry in scheduled], dtype=np.int64),
        lens,
        np.array([entry.num_drafts for entry in scheduled], dtype=np.int64),
        query_start,
        logits_start,
        req_of_token,
        np.arange(len(req_of_token)) - query_start[req_of_token],
        req_of_logit,
        logits_indices,
    ]
    (row_ids, planned_starts, dev_lens, planned_drafts, dev_query_start, dev_logits_start,
     token_reqs, token_offsets, logit_reqs, dev_logits_indices) = _copy_packed(host, device)  # fmt: skip

    computed = rows.num_computed_tokens[row_ids].to(torch.int64)
    starts = torch.where(planned_starts >= 0, planned_starts, computed)
    positions = starts[token_reqs] + token_offsets
    token_rows = row_ids[token_reqs]
    limits = rows.token_limit[row_ids].to(torch.int64)
    token_limits = limits[token_reqs]
    attention = AttentionInputs(
        query_lens=query_lens,
        max_seq_lens=[entry.max_seq_len for entry in scheduled],
        query_start_loc=dev_query_start.to(torch.int32),
        # Behind the limit nothing is stored: tokens there see what is, and what they give is never emitted.
        seq_lens=torch.minimum(starts + dev_lens, limits).to(torch.int32),
        positions=positions,
        block_tables=tuple(table[row_ids] for table in block_tables.tables),
        slot_mappings=tuple(
            block_tables.slot_mapping(group, token_rows, positions, token_limits)
            for group in range(len(block_tables.tables))
        ),
        block_size=block_tables.block_size,
    )
    return InputBatch(
        scheduled=scheduled,
        row_list=row_list,
        rows=row_ids,
        starts=starts,
        query_lens=dev_lens,
        is_prefill=planned_starts >= 0,
        num_drafts=torch.minimum(rows.num_drafts[row_ids].to(torch.int64), planned_drafts),
        max_drafts=max((entry.num_drafts for entry in scheduled), default=0),
        input_ids=rows.token_history[token_rows, positions].to(torch.int64),
        logits_indices=dev_logits_indices,
        logits_start=dev_logits_start,
        logits_reqs=logit_reqs,
        logits_rows=row_ids[logit_reqs],
        logits_positions=positions[dev_logits_indices] + 1,
        logits_row_list=[row for row, count in zip(row_list, num_logits, strict=True) for _ in range(count)],
        attention=attention,
    )


def _exclusive_cumsum(values: np.ndarray) -> np.ndarray:
    """[a, b, c] -> [0, a, a + b, a + b + c]."""
    result = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=result[1:])
    return result


def _copy_packed(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """One copy for all int64 arrays; returns views of it."""
    packed = to_device(np.concatenate(arrays), device)
    return list(torch.split(packed, [len(array) for array in arrays]))
