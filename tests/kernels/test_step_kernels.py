"""A step's bookkeeping on the request rows: the kernels give what their references give, bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.batch.input_batch import lay_out, lay_out_decode
from engine.batch.request_rows import RequestRows
from engine.kernels.check_drafts import check_drafts_reference, check_drafts_triton
from engine.kernels.draft_history import (
    last_token_reference,
    last_token_triton,
    read_history_reference,
    read_history_triton,
    record_draft_reference,
    record_draft_triton,
)
from engine.kernels.draft_positions import draft_positions_reference, draft_positions_triton
from engine.kernels.emit_runs import Verification, emit_runs_reference, emit_runs_triton
from engine.kernels.pack_results import pack_results_reference, pack_results_triton
from engine.kernels.step_inputs import StepLayout, step_inputs_reference, step_inputs_triton
from engine.kernels.usable_drafts import usable_drafts_reference, usable_drafts_triton
from engine.step import ScheduledRequest

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_ROWS = 9  # the last one pads: it has no tokens, and room for none
PADDING_ROW = NUM_ROWS - 1
MAX_MODEL_LEN, MAX_DRAFTS, BLOCK_SIZE = 400, 4, 4
VOCAB_SIZE = 50
SEEDS = range(6)


@dataclass
class World:
    """Rows in the middle of things, and block tables of three KV groups."""

    generator: random.Random
    rows: RequestRows
    block_tables: torch.Tensor

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Random, `high` excluded."""
        seed = self.generator.randrange(2**31)
        return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)

    def flags(self, *shape: int) -> torch.Tensor:
        return self.ints(0, 2, *shape).bool()


def make_world(seed: int) -> World:
    rows = RequestRows(NUM_ROWS, MAX_MODEL_LEN, MAX_DRAFTS, DEVICE)
    world = World(random.Random(seed), rows, torch.empty(0))
    num_blocks = MAX_MODEL_LEN // BLOCK_SIZE
    world.block_tables = world.ints(0, 1000, 3, NUM_ROWS, num_blocks).to(torch.int32)
    requests = slice(0, PADDING_ROW)
    rows.token_history[requests] = world.ints(0, VOCAB_SIZE, PADDING_ROW, rows.token_history.shape[1]).int()
    rows.num_tokens[requests] = world.ints(1, MAX_MODEL_LEN, PADDING_ROW).int()
    rows.num_computed_tokens[requests] = rows.num_tokens[requests] - 1
    room = world.ints(0, MAX_DRAFTS + 3, PADDING_ROW).int()
    rows.token_limit[requests] = (rows.num_tokens[requests] + room).clamp(max=MAX_MODEL_LEN)
    rows.num_drafts[requests] = world.ints(0, MAX_DRAFTS + 1, PADDING_ROW).int()
    return world


def ragged(world: World) -> tuple[StepLayout, int]:
    """Some requests decode, the others compute chunks, of which some end their prompt."""
    entries = []
    for row in world.generator.sample(range(PADDING_ROW), world.generator.randrange(1, NUM_ROWS)):
        if world.generator.random() < 0.5:
            num_drafts = world.generator.randrange(MAX_DRAFTS + 1)
            entries.append(
                ScheduledRequest(
                    row=row, num_tokens=1 + num_drafts, num_drafts=num_drafts, max_seq_len=MAX_MODEL_LEN
                )
            )
        else:
            start = world.generator.randrange(20)
            entries.append(
                ScheduledRequest(
                    row=row,
                    num_tokens=world.generator.choice((1, 5, 17, 300)),
                    start=start,
                    samples=world.generator.random() < 0.5,
                    max_seq_len=MAX_MODEL_LEN,
                )
            )
    layout = lay_out(entries, DEVICE)
    return layout.tensors, max(layout.query_lens)


def uniform(world: World, num_drafts: int) -> tuple[StepLayout, int]:
    """Decodes, padded."""
    rows = world.generator.sample(range(PADDING_ROW), 5) + [PADDING_ROW] * 2
    planned = [world.generator.randrange(num_drafts + 1) for _ in range(5)] + [0, 0]
    inputs = torch.tensor([rows, planned, planned], device=DEVICE)
    layout = lay_out_decode(*inputs, max_drafts=num_drafts, max_seq_len=MAX_MODEL_LEN)
    return layout.tensors, 1 + num_drafts


def check_equal(actual: Any, expected: Any) -> None:
    """Two dataclasses or tuples of tensors, dtypes included."""
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, tuple):
        for left, right in zip(actual, expected, strict=True):
            check_equal(left, right)
    else:
        for field in fields(expected):
            check_equal(getattr(actual, field.name), getattr(expected, field.name))


def state_of(rows: RequestRows) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in vars(rows).items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_drafts", [None, 0, 3], ids=["ragged", "decode", "verify"])
def test_step_inputs(seed: int, num_drafts: int | None) -> None:
    world = make_world(seed)
    layout, max_query_len = ragged(world) if num_drafts is None else uniform(world, num_drafts)
    before = state_of(world.rows)
    expected = step_inputs_reference(layout, world.rows, world.block_tables, BLOCK_SIZE)
    actual = step_inputs_triton(
        layout,
        world.rows,
        world.block_tables,
        BLOCK_SIZE,
        max_query_len=max_query_len,
        num_ahead=MAX_DRAFTS + 1,
    )
    # Of the block tables, what the step and its drafts can reach.
    for request, (start, length) in enumerate(zip(expected.starts, layout.lens, strict=True)):
        reach = int(start + length + MAX_DRAFTS) // BLOCK_SIZE + 1
        assert torch.equal(actual.block_tables[:, request, :reach], expected.block_tables[:, request, :reach])
    actual.block_tables.copy_(expected.block_tables)
    check_equal(actual, expected)
    for name, value in before.items():
        assert torch.equal(getattr(world.rows, name), value), name


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_drafts", [None, 0, 3], ids=["ragged", "decode", "verify"])
def test_emit_runs(seed: int, num_drafts: int | None) -> None:
    world, other = make_world(seed), make_world(seed)
    layout, _ = ragged(world) if num_drafts is None else uniform(world, num_drafts)
    num_logits = len(layout.logits_reqs)
    is_last = layout.logits_indices + 1 == layout.query_start_loc[1:][layout.logits_reqs]
    batch = SimpleNamespace(
        rows=layout.rows,
        starts=torch.where(
            layout.is_prefill, layout.planned_starts, world.rows.num_computed_tokens[layout.rows]
        ),
        query_lens=layout.lens,
        is_prefill=layout.is_prefill,
        logits_start=layout.logits_start,
        max_drafts=MAX_DRAFTS if num_drafts is None else num_drafts,
    )
    ruled = (
        world.ints(0, VOCAB_SIZE, num_logits),
        (world.ints(0, 4, num_logits) > 0) & ~is_last,
        world.ints(0, 4, num_logits) == 0,
    )
    actual = emit_runs_triton(*ruled, batch, world.rows)
    check_equal(actual, emit_runs_reference(*ruled, batch, other.rows))
    for name, value in state_of(other.rows).items():
        assert torch.equal(getattr(world.rows, name), value), name


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("k", [0, 1, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_check_drafts(seed: int, k: int, writes: bool) -> None:
    world, other = make_world(seed), make_world(seed)
    rows = world.ints(0, NUM_ROWS, 40).unique()
    world.rows.num_tokens.clamp_(max=MAX_MODEL_LEN - MAX_DRAFTS)
    other.rows.num_tokens.clamp_(max=MAX_MODEL_LEN - MAX_DRAFTS)
    token_ids = world.ints(-1, VOCAB_SIZE + 2, len(rows), k)
    counts, usable = world.ints(0, k + 2, len(rows)), world.ints(0, k + 2, len(rows))
    arguments = (token_ids, counts, usable, VOCAB_SIZE, rows)
    actual = check_drafts_triton(*arguments, world.rows if writes else None)
    check_equal(actual, check_drafts_reference(*arguments, other.rows if writes else None))
    for name, value in state_of(other.rows).items():
        assert torch.equal(getattr(world.rows, name), value), name


@pytest.mark.parametrize("seed", SEEDS)
def test_usable_drafts(seed: int) -> None:
    world = make_world(seed)
    rows = torch.arange(NUM_ROWS, device=DEVICE)
    wanted, sampled = world.ints(0, MAX_DRAFTS + 1, NUM_ROWS), world.ints(0, 3, NUM_ROWS)
    check_equal(
        usable_drafts_triton(wanted, sampled, rows, world.rows),
        usable_drafts_reference(wanted, sampled, rows, world.rows),
    )


@pytest.mark.parametrize("has_next", [True, False])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_pack_results(width: int, has_next: bool) -> None:
    world, n = make_world(0), 5
    runs = Verification(world.ints(-1, 9, n, width), world.ints(0, 5, n), world.ints(0, 5, n), world.flags(n))
    num_drafts, next_drafts = world.ints(0, 5, n), (world.ints(0, 5, n), world.flags(n)) if has_next else None
    check_equal(
        pack_results_triton(runs, num_drafts, next_drafts),
        pack_results_reference(runs, num_drafts, next_drafts),
    )


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize(("step", "offset"), [(0, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("seed", SEEDS)
def test_draft_positions(seed: int, step: int, offset: int, stores: bool) -> None:
    world = make_world(seed)
    rows = torch.arange(NUM_ROWS, device=DEVICE)
    usable = usable_drafts_reference(
        world.ints(0, MAX_DRAFTS + 1, NUM_ROWS), torch.ones_like(rows), rows, world.rows
    )
    arguments = (
        world.rows.num_tokens[rows].long().clamp(min=1),
        usable,
        rows,
        world.rows.token_limit,
        world.block_tables[1:],
    )
    options: Any = {"block_size": BLOCK_SIZE, "step": step, "offset": offset, "stores": stores}
    check_equal(
        draft_positions_triton(*arguments, **options), draft_positions_reference(*arguments, **options)
    )


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_read_history(seed: int, shift: int) -> None:
    world = make_world(seed)
    layout, max_query_len = ragged(world)
    positions = layout.token_offsets + 3
    arguments = (world.rows.token_history, layout.rows, layout.query_start_loc, positions)
    check_equal(
        read_history_triton(*arguments, shift=shift, max_query_len=max_query_len),
        read_history_reference(*arguments, shift=shift),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_last_token(seed: int) -> None:
    rows = make_world(seed).rows
    every = torch.arange(NUM_ROWS, device=DEVICE)
    arguments = (rows.token_history, every, rows.num_tokens)
    check_equal(last_token_triton(*arguments), last_token_reference(*arguments))


@pytest.mark.parametrize("seed", SEEDS)
def test_record_draft(seed: int) -> None:
    world, other = make_world(seed), make_world(seed)
    rows = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))[:6].to(DEVICE)
    positions = world.rows.num_tokens[rows].long() + 3
    positions[0] = world.rows.token_history.shape[1] + 2  # no draft of it is used
    draft = world.ints(-1, VOCAB_SIZE, 6)
    actual = record_draft_triton(world.rows.token_history, rows, positions, draft)
    check_equal(actual, record_draft_reference(other.rows.token_history, rows, positions, draft))
    assert torch.equal(world.rows.token_history, other.rows.token_history)
