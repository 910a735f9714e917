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
from engine.kernels.step_inputs import StepLayout, step_inputs
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
    logits_rows: torch.Tensor  # [num_logits] int64; request row
    logits_positions: torch.Tensor  # [num_logits] int64; position of the token to draw
    logits_row_list: list[int]  # `logits_rows` on the host
    logits_steps: torch.Tensor  # [num_logits] int64; index of the logits row within its request
    draft_ids: (
        torch.Tensor
    )  # [num_logits] int64; the draft that the row decides about, -1 where there is none
    attention: AttentionInputs

    @property
    def num_reqs(self) -> int:
        return len(self.row_list)

    @property
    def is_decode_only(self) -> bool:
        return not any(entry.is_prefill for entry in self.scheduled)

    def of_logits_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[num_tokens, ...] -> [num_logits, ...]; the tensor itself where logits are computed of every token."""
        return tensor if len(self.logits_indices) == len(tensor) else tensor[self.logits_indices]


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Which tokens of which rows a step computes: all that the host decides."""

    scheduled: Sequence[ScheduledRequest]
    row_list: list[int]
    query_lens: list[int]
    max_seq_lens: list[int]
    logits_row_list: list[int]
    max_drafts: int
    wanted_drafts: torch.Tensor  # [num_reqs] int64; drafts to make
    tensors: StepLayout


def gather_batch(
    scheduled: Sequence[ScheduledRequest], rows: RequestRows, block_tables: BlockTables
) -> InputBatch:
    """Build the batch of a plan's `scheduled` list. No host sync."""
    return derive_batch(lay_out(scheduled, rows.device), rows, block_tables)


def derive_batch(layout: BatchLayout, rows: RequestRows, block_tables: BlockTables) -> InputBatch:
    """Join the layout with what the rows know: launches only, so that they may be captured."""
    tensors = layout.tensors
    inputs = step_inputs(
        tensors,
        rows,
        block_tables.stacked,
        block_tables.block_size,
        max_query_len=max(layout.query_lens),
        num_ahead=rows.max_drafts + 1,
    )
    attention = AttentionInputs(
        query_lens=layout.query_lens,
        max_seq_lens=layout.max_seq_lens,
        query_start_loc=tensors.query_start_loc,
        seq_lens=inputs.seq_lens,
        positions=inputs.positions,
        block_tables=inputs.block_tables.unbind(),
        slot_mappings=inputs.slot_mappings.unbind(),
        block_size=block_tables.block_size,
    )
    return InputBatch(
        scheduled=layout.scheduled,
        row_list=layout.row_list,
        rows=tensors.rows,
        starts=inputs.starts,
        query_lens=tensors.lens,
        is_prefill=tensors.is_prefill,
        num_drafts=inputs.num_drafts,
        num_wanted=layout.wanted_drafts,
        max_drafts=layout.max_drafts,
        input_ids=inputs.input_ids,
        logits_indices=tensors.logits_indices,
        logits_start=tensors.logits_start,
        logits_rows=inputs.logits_rows,
        logits_positions=inputs.logits_positions,
        logits_row_list=layout.logits_row_list,
        logits_steps=tensors.logits_steps,
        draft_ids=inputs.draft_ids,
        attention=attention,
    )


def lay_out(scheduled: Sequence[ScheduledRequest], device: torch.device) -> BatchLayout:
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
    logits_steps = np.arange(len(req_of_logit)) - logits_start[req_of_logit]
    # A request's logits rows are its last ones: token index = end of its tokens - its number of logits + j.
    logits_indices = (query_start[1:] - logits_lens)[req_of_logit] + logits_steps
    host = [
        np.array(row_list, dtype=np.int64),
        np.array([entry.start for entry in scheduled], dtype=np.int64),
        np.array([entry.num_drafts for entry in scheduled], dtype=np.int64),
        np.array([entry.num_next_drafts for entry in scheduled], dtype=np.int64),
        lens,
        query_start,
        logits_start,
        req_of_token,
        np.arange(len(req_of_token)) - query_start[req_of_token],
        req_of_logit,
        logits_steps,
        logits_indices,
    ]
    (row_ids, planned_starts, planned_drafts, wanted_drafts, dev_lens, dev_query_start, dev_logits_start, token_reqs,
     token_offsets, logits_reqs, dev_logits_steps, dev_logits_indices) = _copy_packed(host, device)  # fmt: skip
    return BatchLayout(
        scheduled=scheduled,
        row_list=row_list,
        query_lens=query_lens,
        max_seq_lens=[entry.max_seq_len for entry in scheduled],
        logits_row_list=[row for row, count in zip(row_list, num_logits, strict=True) for _ in range(count)],
        max_drafts=max((entry.num_drafts for entry in scheduled), default=0),
        wanted_drafts=wanted_drafts,
        tensors=StepLayout(
            rows=row_ids,
            planned_starts=planned_starts,
            planned_drafts=planned_drafts,
            lens=dev_lens,
            is_prefill=planned_starts >= 0,
            query_start_loc=dev_query_start.to(torch.int32),
            logits_start=dev_logits_start,
            token_reqs=token_reqs,
            token_offsets=token_offsets,
            logits_reqs=logits_reqs,
            logits_steps=dev_logits_steps,
            logits_indices=dev_logits_indices,
        ),
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
    reqs, offsets = tokens // width, tokens % width
    return BatchLayout(
        scheduled=(),
        row_list=[],
        query_lens=[width] * num_reqs,
        max_seq_lens=[max_seq_len] * num_reqs,
        logits_row_list=[],
        max_drafts=max_drafts,
        wanted_drafts=wanted_drafts,
        tensors=StepLayout(
            rows=rows,
            planned_starts=torch.full_like(rows, -1),
            planned_drafts=planned_drafts,
            lens=torch.full_like(rows, width),
            is_prefill=torch.zeros_like(rows, dtype=torch.bool),
            query_start_loc=starts.to(torch.int32),
            logits_start=starts,
            token_reqs=reqs,
            token_offsets=offsets,
            logits_reqs=reqs,
            logits_steps=offsets,
            logits_indices=tokens,
        ),
    )


def _exclusive_cumsum(values: np.ndarray) -> np.ndarray:
    """[a, b, c] -> [0, a, a + b, a + b + c]."""
    result = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=result[1:])
    return result


def _copy_packed(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """One copy for all int64 arrays; returns views of it, each aligned to 16 bytes: kernels are compiled anew for other
    alignments."""
    lengths = [len(array) + len(array) % 2 for array in arrays]
    packed = np.zeros(sum(lengths), dtype=np.int64)
    for part, array in zip(np.split(packed, np.cumsum(lengths)[:-1]), arrays, strict=True):
        part[: len(array)] = array
    views = torch.split(to_device(packed, device), lengths)
    return [view[: len(array)] for view, array in zip(views, arrays, strict=True)]
