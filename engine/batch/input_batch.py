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
from engine.batch.request_rows import RequestRows
from engine.device import to_device
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
    num_wanted: torch.Tensor  # [num_reqs] int64; drafts wanted for the next step
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

    @property
    def is_decode_only(self) -> bool:
        return not any(entry.is_prefill for entry in self.scheduled)


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Which tokens of which rows a step computes: all that the host decides. Tensors are int64, on the device."""

    scheduled: Sequence[ScheduledRequest]
    row_list: list[int]
    query_lens: list[int]
    max_seq_lens: list[int]
    logits_row_list: list[int]
    max_drafts: int
    rows: torch.Tensor  # [num_reqs]
    planned_starts: torch.Tensor  # [num_reqs]; -1: where the row's computed tokens end
    lens: torch.Tensor  # [num_reqs]; a decode may have more tokens than the last one and its drafts: padding
    planned_drafts: torch.Tensor  # [num_reqs]; drafts to verify, at most
    wanted_drafts: torch.Tensor  # [num_reqs]; drafts to make
    query_start: torch.Tensor  # [num_reqs + 1]
    logits_start: torch.Tensor  # [num_reqs + 1]
    token_reqs: torch.Tensor  # [num_tokens]; batch index
    token_offsets: torch.Tensor  # [num_tokens]; within its request
    logits_reqs: torch.Tensor  # [num_logits]; batch index
    logits_indices: torch.Tensor  # [num_logits]; token index


def gather_batch(
    scheduled: Sequence[ScheduledRequest], rows: RequestRows, block_tables: BlockTables
) -> InputBatch:
    """Build the batch of a plan's `scheduled` list. No host sync."""
    return derive_batch(_lay_out(scheduled, rows.device), rows, block_tables)


def derive_batch(layout: BatchLayout, rows: RequestRows, block_tables: BlockTables) -> InputBatch:
    """Join the layout with what the rows know: launches only, so that they may be captured."""
    row_ids = layout.rows
    computed = rows.num_computed_tokens[row_ids].to(torch.int64)
    starts = torch.where(layout.planned_starts >= 0, layout.planned_starts, computed)
    positions = starts[layout.token_reqs] + layout.token_offsets
    token_rows = row_ids[layout.token_reqs]
    is_prefill = layout.planned_starts >= 0
    ends = starts + torch.where(is_prefill, layout.lens, 1 + layout.planned_drafts)
    # Behind the limit nothing is stored: tokens there see what is, and what they give is never emitted.
    ends = torch.minimum(ends, rows.token_limit[row_ids])
    token_limits = ends[layout.token_reqs]
    attention = AttentionInputs(
        query_lens=layout.query_lens,
        max_seq_lens=layout.max_seq_lens,
        query_start_loc=layout.query_start.to(torch.int32),
        seq_lens=ends.to(torch.int32),
        positions=positions,
        block_tables=tuple(table[row_ids] for table in block_tables.tables),
        slot_mappings=tuple(
            block_tables.slot_mapping(group, token_rows, positions, token_limits)
            for group in range(len(block_tables.tables))
        ),
        block_size=block_tables.block_size,
    )
    return InputBatch(
        scheduled=layout.scheduled,
        row_list=layout.row_list,
        rows=row_ids,
        starts=starts,
        query_lens=layout.lens,
        is_prefill=is_prefill,
        num_drafts=torch.minimum(rows.num_drafts[row_ids].to(torch.int64), layout.planned_drafts),
        num_wanted=layout.wanted_drafts,
        max_drafts=layout.max_drafts,
        input_ids=rows.token_history[token_rows, positions].to(torch.int64),
        logits_indices=layout.logits_indices,
        logits_start=layout.logits_start,
        logits_reqs=layout.logits_reqs,
        logits_rows=row_ids[layout.logits_reqs],
        logits_positions=positions[layout.logits_indices] + 1,
        logits_row_list=layout.logits_row_list,
        attention=attention,
    )


def _lay_out(scheduled: Sequence[ScheduledRequest], device: torch.device) -> BatchLayout:
    """The plan as arrays, in one copy."""
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
        np.array([entry.num_next_drafts for entry in scheduled], dtype=np.int64),
        query_start,
        logits_start,
        req_of_token,
        np.arange(len(req_of_token)) - query_start[req_of_token],
        req_of_logit,
        logits_indices,
    ]
    (row_ids, planned_starts, dev_lens, planned_drafts, wanted_drafts, dev_query_start, dev_logits_start,
     token_reqs, token_offsets, logits_reqs, dev_logits_indices) = _copy_packed(host, device)  # fmt: skip
    return BatchLayout(
        scheduled=scheduled,
        row_list=row_list,
        query_lens=query_lens,
        max_seq_lens=[entry.max_seq_len for entry in scheduled],
        logits_row_list=[row for row, count in zip(row_list, num_logits, strict=True) for _ in range(count)],
        max_drafts=max((entry.num_drafts for entry in scheduled), default=0),
        rows=row_ids,
        planned_starts=planned_starts,
        lens=dev_lens,
        planned_drafts=planned_drafts,
        wanted_drafts=wanted_drafts,
        query_start=dev_query_start,
        logits_start=dev_logits_start,
        token_reqs=token_reqs,
        token_offsets=token_offsets,
        logits_reqs=logits_reqs,
        logits_indices=dev_logits_indices,
    )


def lay_out_decode(
    rows: torch.Tensor,
    planned_drafts: torch.Tensor,
    wanted_drafts: torch.Tensor,
    *,
    max_drafts: int,
    max_seq_len: int,
) -> BatchLayout:
    """Every row computes its last token and up to `max_drafts` drafts: 1 + max_drafts tokens, padding included.

    rows, planned_drafts, wanted_drafts: [num_reqs] int64, read when the batch is derived; max_seq_len: of any of the
    rows, at any time.
    """
    num_reqs, width = len(rows), 1 + max_drafts
    starts = torch.arange(num_reqs + 1, device=rows.device) * width
    tokens = torch.arange(num_reqs * width, device=rows.device)
    token_reqs = tokens // width
    return BatchLayout(
        scheduled=(),
        row_list=[],
        query_lens=[width] * num_reqs,
        max_seq_lens=[max_seq_len] * num_reqs,
        logits_row_list=[],
        max_drafts=max_drafts,
        rows=rows,
        planned_starts=torch.full_like(rows, -1),
        lens=torch.full_like(rows, width),
        planned_drafts=planned_drafts,
        wanted_drafts=wanted_drafts,
        query_start=starts,
        logits_start=starts,
        token_reqs=token_reqs,
        token_offsets=tokens % width,
        logits_reqs=token_reqs,
        logits_indices=tokens,
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
