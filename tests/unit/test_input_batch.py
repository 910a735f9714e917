"""The gathered batch: what the plan says, joined with what only the rows know."""

from __future__ import annotations

import random

import pytest
import torch

from engine.batch.block_tables import BlockTables
from engine.batch.input_batch import InputBatch, gather_batch
from engine.batch.request_rows import RequestRows
from engine.kv_spec import PAD_SLOT_ID
from engine.step import BlockTableUpdate, ScheduledRequest

NUM_ROWS, MAX_MODEL_LEN, MAX_DRAFTS, BLOCK_SIZE = 6, 32, 4, 4
CPU = torch.device("cpu")


class Device:
    """Rows whose history at position p is 100 * row + p, and whose blocks are 8 * row, 8 * row + 1, ..."""

    def __init__(self) -> None:
        self.rows = RequestRows(NUM_ROWS, MAX_MODEL_LEN, MAX_DRAFTS, CPU)
        capacity = self.rows.token_history.shape[1]
        self.rows.token_history.copy_(torch.arange(NUM_ROWS)[:, None] * 100 + torch.arange(capacity))
        self.rows.token_limit.fill_(MAX_MODEL_LEN)
        self.tables = BlockTables(1, NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, CPU)
        self.tables.apply(
            [BlockTableUpdate(0, row, 0, list(range(8 * row, 8 * row + 8))) for row in range(NUM_ROWS)]
        )

    def gather(self, *scheduled: ScheduledRequest) -> InputBatch:
        return gather_batch(scheduled, self.rows, self.tables)


def decode(row: int, num_drafts: int = 0, max_seq_len: int = MAX_MODEL_LEN) -> ScheduledRequest:
    return ScheduledRequest(
        row=row, num_tokens=1 + num_drafts, num_drafts=num_drafts, max_seq_len=max_seq_len
    )


def chunk(row: int, start: int, num_tokens: int, *, samples: bool = True) -> ScheduledRequest:
    return ScheduledRequest(
        row=row, num_tokens=num_tokens, start=start, samples=samples, max_seq_len=start + num_tokens
    )


def test_worked_example() -> None:
    """That of InputBatch: two requests, positions of the decode known to the device only."""
    device = Device()
    device.rows.num_computed_tokens[4] = 10
    device.rows.num_drafts[4] = 2
    batch = device.gather(decode(4, num_drafts=2), chunk(1, start=8, num_tokens=2))
    attention = batch.attention
    assert attention.query_lens == [3, 2]
    assert attention.query_start_loc.tolist() == [0, 3, 5]
    assert attention.positions.tolist() == [10, 11, 12, 8, 9]
    assert attention.seq_lens.tolist() == [13, 10]
    assert attention.block_tables[0].tolist() == [list(range(32, 40)), list(range(8, 16))]
    assert attention.slot_mappings[0].tolist() == [138, 139, 140, 40, 41]
    assert batch.row_list == batch.rows.tolist() == [4, 1]
    assert batch.starts.tolist() == [10, 8]
    assert batch.is_prefill.tolist() == [False, True]
    assert batch.num_drafts.tolist() == [2, 0]
    assert batch.max_drafts == 2
    assert batch.input_ids.tolist() == [410, 411, 412, 108, 109]
    assert batch.logits_indices.tolist() == [0, 1, 2, 4]
    assert batch.logits_start.tolist() == [0, 3, 4]
    assert batch.logits_steps.tolist() == [0, 1, 2, 0]
    assert batch.draft_ids.tolist() == [411, 412, -1, -1]
    assert batch.logits_rows.tolist() == batch.logits_row_list == [4, 4, 4, 1]
    assert batch.logits_positions.tolist() == [11, 12, 13, 10]


def test_chunk_that_does_not_end_the_prefill_has_no_logits() -> None:
    batch = Device().gather(chunk(2, 0, 5, samples=False), chunk(0, 4, 1), chunk(3, 3, 2, samples=False))
    assert batch.logits_indices.tolist() == [5]
    assert batch.logits_start.tolist() == [0, 0, 1, 1]
    assert batch.logits_row_list == [0]
    batch = Device().gather(chunk(2, 0, 5, samples=False))
    assert batch.logits_start.tolist() == [0, 0]
    assert batch.logits_indices.tolist() == batch.logits_positions.tolist() == batch.logits_row_list == []


def test_no_more_drafts_are_verified_than_stand_in_the_row_or_were_planned() -> None:
    device = Device()
    device.rows.num_drafts.copy_(torch.tensor([0, 1, 2, 3, 4, 4]))
    batch = device.gather(*(decode(row, num_drafts=2) for row in range(NUM_ROWS - 1)), chunk(5, 0, 3))
    assert batch.num_drafts.tolist() == [0, 1, 2, 2, 2, 0]


def test_tokens_behind_the_limit_have_no_slot_and_are_no_keys() -> None:
    device = Device()
    device.rows.num_computed_tokens[0] = 9
    device.rows.token_limit[0] = 11
    batch = device.gather(decode(0, num_drafts=3, max_seq_len=11))
    assert batch.attention.positions.tolist() == [9, 10, 11, 12]
    assert batch.attention.slot_mappings[0].tolist() == [9, 10, PAD_SLOT_ID, PAD_SLOT_ID]
    assert batch.attention.seq_lens.tolist() == [11]
    assert batch.attention.max_seq_lens == [11]


def test_prefill_starts_where_the_plan_says_whatever_the_row_knows() -> None:
    """The chunk before it may be in flight, and a resumed request's row may hold counts of its predecessor."""
    device = Device()
    device.rows.num_computed_tokens[1] = 27
    assert device.gather(chunk(1, start=3, num_tokens=2)).attention.positions.tolist() == [3, 4]


@pytest.mark.parametrize("seed", range(10))
def test_random_batches_equal_a_loop(seed: int) -> None:
    generator = random.Random(seed)
    device = Device()
    device.rows.num_computed_tokens.copy_(torch.tensor([generator.randrange(1, 20) for _ in range(NUM_ROWS)]))
    order = generator.sample(range(NUM_ROWS), generator.randrange(1, NUM_ROWS + 1))
    split = generator.randrange(len(order) + 1)
    scheduled = [decode(row, generator.randrange(MAX_DRAFTS + 1)) for row in order[:split]]
    scheduled += [
        chunk(row, generator.randrange(9), generator.randrange(1, 7), samples=generator.random() < 0.5)
        for row in order[split:]
    ]
    batch = device.gather(*scheduled)
    positions, logits_indices, logits_positions = [], [], []
    for entry in scheduled:
        start = entry.start if entry.is_prefill else int(device.rows.num_computed_tokens[entry.row])
        own = list(range(start, start + entry.num_tokens))
        first_logit = entry.num_tokens - (1 + entry.num_drafts) if entry.samples else entry.num_tokens
        logits_indices += [len(positions) + index for index in range(first_logit, entry.num_tokens)]
        logits_positions += [position + 1 for position in own[first_logit:]]
        positions += own
    rows = [entry.row for entry in scheduled for _ in range(entry.num_tokens)]
    assert batch.attention.positions.tolist() == positions
    assert batch.input_ids.tolist() == [100 * row + p for row, p in zip(rows, positions, strict=True)]
    assert batch.attention.slot_mappings[0].tolist() == [
        (8 * row + p // BLOCK_SIZE) * BLOCK_SIZE + p % BLOCK_SIZE
        for row, p in zip(rows, positions, strict=True)
    ]
    assert batch.logits_indices.tolist() == logits_indices
    assert batch.logits_positions.tolist() == logits_positions
