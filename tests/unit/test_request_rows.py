"""Tokens land in the row, at the place and in the number that was said; everything else in the history stays."""

from __future__ import annotations

import random

import pytest
import torch

from engine.batch.request_rows import RequestRows
from engine.params import SamplingParams
from engine.step import NewRow

MAX_MODEL_LEN, MAX_DRAFTS = 8, 3
CAPACITY = MAX_MODEL_LEN + MAX_DRAFTS + 1


def make_rows(num_rows: int = 3) -> RequestRows:
    """Histories [0, 1, 2, ...], [100, 101, ...], ..."""
    rows = RequestRows(num_rows, MAX_MODEL_LEN, MAX_DRAFTS, torch.device("cpu"))
    rows.token_history.copy_(torch.arange(num_rows)[:, None] * 100 + torch.arange(CAPACITY))
    return rows


def write(
    rows: RequestRows, row_ids: list[int], first: list[int], token_ids: list[list[int]], counts: list[int]
) -> None:
    width = len(token_ids[0])
    rows.write_tokens(
        torch.tensor(row_ids),
        torch.tensor(first),
        torch.tensor(token_ids, dtype=torch.int64).view(len(row_ids), width),
        torch.tensor(counts),
    )


def test_only_counted_tokens_are_written() -> None:
    rows = make_rows()
    write(rows, [2, 0], [1, 4], [[7, 8, 9], [5, 6, -1]], [3, 2])
    assert rows.token_history[0].tolist() == [0, 1, 2, 3, 5, 6, 6, 7, 8, 9, 10, 11]
    assert rows.token_history[1].tolist() == list(range(100, 112))
    assert rows.token_history[2].tolist() == [200, 7, 8, 9, *range(204, 212)]


@pytest.mark.parametrize("first", range(CAPACITY + 2))
def test_nothing_is_written_for_a_count_of_zero_wherever_it_points(first: int) -> None:
    rows = make_rows(1)
    before = rows.token_history.clone()
    write(rows, [0], [first], [[-1, -1, -1, -1]], [0])
    assert torch.equal(rows.token_history, before)


def test_no_tokens_at_all() -> None:
    rows = make_rows(1)
    before = rows.token_history.clone()
    write(rows, [0], [2], [[]], [0])
    assert torch.equal(rows.token_history, before)


def test_longest_history_with_all_drafts_fits() -> None:
    """The width of the batch reaches beyond the capacity; the tokens do not."""
    rows = make_rows(2)
    write(rows, [0], [MAX_MODEL_LEN], [[50, 51, 52, -1, -1]], [MAX_DRAFTS])
    assert rows.token_history[0].tolist() == [*range(8), 50, 51, 52, 11]
    assert rows.token_history[1].tolist() == list(range(100, 112))


@pytest.mark.parametrize("seed", range(20))
def test_random_writes_equal_a_loop(seed: int) -> None:
    generator = random.Random(seed)
    rows = make_rows(4)
    expected = rows.token_history.tolist()
    for _ in range(20):
        width = generator.randrange(1, MAX_DRAFTS + 2)
        row_ids = generator.sample(range(4), generator.randrange(1, 5))
        first = [generator.randrange(MAX_MODEL_LEN) for _ in row_ids]
        token_ids = [[generator.randrange(1000) for _ in range(width)] for _ in row_ids]
        counts = [generator.randrange(width + 1) for _ in row_ids]
        write(rows, row_ids, first, token_ids, counts)
        for row, start, tokens, count in zip(row_ids, first, token_ids, counts, strict=True):
            expected[row][start : start + count] = tokens[:count]
        assert rows.token_history.tolist() == expected


def test_the_next_request_of_a_row_starts_without_drafts() -> None:
    rows = make_rows()
    rows.set_drafts({1: [5, 6]})
    new = NewRow(
        row=1,
        request_id="r",
        token_ids=[4, 5, 6],
        num_prompt_tokens=2,
        num_computed_tokens=1,
        token_limit=7,
        params=SamplingParams(max_tokens=5),
        stop_ids=(),
    )
    rows.set_row(new)
    counts = (
        rows.num_prompt_tokens,
        rows.num_tokens,
        rows.num_computed_tokens,
        rows.num_drafts,
        rows.token_limit,
    )
    assert [int(count[1]) for count in counts] == [2, 3, 1, 0, 7]
    assert rows.token_history[1, :3].tolist() == [4, 5, 6]
    assert all(int(count[0]) == int(count[2]) == 0 for count in counts)


def test_host_drafts_stand_behind_the_known_tokens() -> None:
    rows = make_rows()
    rows.num_tokens.copy_(torch.tensor([3, 5, 8]))
    rows.num_drafts.copy_(torch.tensor([1, 2, 3]))
    rows.set_drafts({2: [7], 0: [5, 6, 9]})
    assert rows.num_drafts.tolist() == [3, 2, 1]
    assert rows.token_history[0].tolist() == [0, 1, 2, 5, 6, 9, *range(6, 12)]
    assert rows.token_history[1].tolist() == list(range(100, 112))
    assert rows.token_history[2].tolist() == [*range(200, 208), 7, 209, 210, 211]
