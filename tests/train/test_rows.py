"""Packing, masks and the bookkeeping of draft steps, on rows that are small enough to write down."""

from __future__ import annotations

import numpy as np
import torch

from tools.train.attention import visible_keys
from tools.train.draft_loss import chain_counts, step_mask
from tools.train.rows import Document, Prose, pack_documents

CPU = torch.device("cpu")


def test_every_document_is_in_exactly_one_row_and_whole() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 30, size=200)
    documents = [Document([number + 1] * length) for number, length in enumerate(lengths.tolist())]
    rows = pack_documents(documents, 32, seed=1)
    found = np.bincount(rows.token_ids.flatten(), minlength=201)[1:]
    assert (found == lengths).all()
    assert rows.num_learned == (lengths - 1).sum()
    assert len(rows) < 1.15 * lengths.sum() / 32, "rows are mostly full"


def test_a_document_sees_its_own_past_within_the_window() -> None:
    batch = pack_documents([Document([7, 7, 7, 7])], 6, seed=0).batch(np.arange(1), CPU)
    seen = visible_keys(batch, window=2)[0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],  # padding sees itself
        [0, 0, 0, 0, 0, 1],
    ]


def test_draft_steps_learn_from_answers_only() -> None:
    document = Document([1, 2, 3, 4, 5], num_context=3)  # 4 and 5 are the answer
    batch = pack_documents([document], 7, seed=0).batch(np.arange(1), CPU)
    assert step_mask(batch, 0)[0].tolist() == [False, True, True, False, False, False]  # guesses of 3, [4, 5]
    assert step_mask(batch, 1)[0].tolist() == [True, True, False, False, False]  # guesses of [4, 5]


def test_a_chain_of_drafts_ends_at_the_first_wrong_one() -> None:
    batch = pack_documents([Document([1, 2, 3, 4, 5, 6])], 6, seed=0).batch(np.arange(1), CPU)
    target = torch.tensor([2, 3, 4, 5, 6, 0])
    first = torch.tensor([3, 4, 0, 6, 9, 9])  # of rows 0..3, wrong in row 2
    second = torch.tensor([4, 5, 6, 9, 9, 9])  # of rows 0..2, right in all
    accepted, counts = chain_counts(batch, [first, second], target)
    assert accepted.tolist() == [3, 2]
    assert counts.tolist() == [4, 3]


def test_windows_of_prose_begin_documents_where_they_are_cut() -> None:
    stream = np.array([2, 10, 11, 1, 2, 20, 21, 1], dtype=np.uint16)
    rows = Prose(stream, bos_id=2).rows(np.array([1]), 6)
    assert rows.token_ids.tolist() == [[2, 11, 1, 2, 20, 21]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert rows.is_learned.tolist() == [[False, True, True, False, True, True]]
