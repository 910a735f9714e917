"""Block ids reach the row and group that they are for, and slots follow the tables up to the row's limit exactly."""

from __future__ import annotations

import torch

from engine.batch.block_tables import BlockTables
from engine.kv_spec import PAD_SLOT_ID
from engine.step import BlockTableUpdate

CPU = torch.device("cpu")


def tables_with(*updates: BlockTableUpdate, num_groups: int = 1, max_model_len: int = 16) -> BlockTables:
    tables = BlockTables(num_groups, max_num_rows=3, max_model_len=max_model_len, block_size=4, device=CPU)
    tables.apply(updates)
    return tables


def slots(tables: BlockTables, row: int, positions: list[int], limit: int, group: int = 0) -> list[int]:
    count = len(positions)
    return tables.slot_mapping(
        group, torch.full((count,), row), torch.tensor(positions), torch.full((count,), limit)
    ).tolist()


def test_worked_example() -> None:
    tables = tables_with(BlockTableUpdate(0, 1, 0, [7, 2]))
    assert slots(tables, row=1, positions=[5], limit=16) == [9]


def test_updates_write_their_row_group_and_place_and_nothing_else() -> None:
    tables = tables_with(
        BlockTableUpdate(0, 0, 0, [9]),
        BlockTableUpdate(0, 1, 2, [5, 6]),
        BlockTableUpdate(1, 1, 0, [8]),
        num_groups=3,
    )
    assert tables.tables[0].tolist() == [[9, 0, 0, 0], [0, 0, 5, 6], [0, 0, 0, 0]]
    assert tables.tables[1].tolist() == [[0] * 4, [8, 0, 0, 0], [0] * 4]
    assert tables.tables[2].tolist() == [[0] * 4] * 3
    tables.apply([BlockTableUpdate(0, 1, 1, [4]), BlockTableUpdate(0, 1, 3, [])])
    assert tables.tables[0][1].tolist() == [0, 4, 5, 6]
    tables.apply([])
    assert tables.tables[0][1].tolist() == [0, 4, 5, 6]


def test_slots_end_exactly_at_the_limit() -> None:
    tables = tables_with(BlockTableUpdate(0, 2, 0, [3, 1, 4, 2]))
    assert slots(tables, 2, [0, 3, 4, 6, 7, 8], limit=7) == [12, 15, 4, 6, PAD_SLOT_ID, PAD_SLOT_ID]
    assert slots(tables, 2, [15], limit=16) == [11]
    assert slots(tables, 2, [0], limit=0) == [PAD_SLOT_ID]


def test_positions_behind_the_table_are_read_nowhere() -> None:
    """Drafts near the context limit stand up to k positions behind the last block."""
    tables = tables_with(BlockTableUpdate(0, 0, 0, [1, 2, 3]), max_model_len=10)
    assert tables.max_blocks == 3
    assert slots(tables, 0, [9, 10, 11, 12, 1000], limit=10) == [13, *[PAD_SLOT_ID] * 4]


def test_each_token_has_its_own_row_limit_and_group() -> None:
    tables = tables_with(
        BlockTableUpdate(0, 0, 0, [1]),
        BlockTableUpdate(0, 1, 0, [2]),
        BlockTableUpdate(1, 1, 0, [6]),
        num_groups=2,
    )
    rows, positions, limits = torch.tensor([1, 0, 1]), torch.tensor([3, 3, 2]), torch.tensor([3, 4, 3])
    assert tables.slot_mapping(0, rows, positions, limits).tolist() == [PAD_SLOT_ID, 7, 10]
    assert tables.slot_mapping(1, rows, positions, limits).tolist() == [PAD_SLOT_ID, 3, 26]
