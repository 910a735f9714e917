"""Prompt lookup against a loop over the definition."""

from __future__ import annotations

import random

import pytest
import torch

from engine.kernels.ngram_lookup import ngram_lookup_reference


def lookup_by_definition(tokens: list[int], k: int, min_n: int, max_n: int) -> list[int] | None:
    """The continuation of the longest earlier occurrence of the tail, the latest of equals; None: there is none."""
    last = len(tokens) - 1
    best, best_length = -1, 0
    for end in range(last):
        length = 0
        while length < max_n and length <= end and tokens[end - length] == tokens[last - length]:
            length += 1
        if length >= max(best_length, 1):
            best, best_length = end, length
    if best_length < min_n:
        return None
    period = last - best
    return [tokens[best + 1 + step % period] for step in range(k)]


def lookup(
    sequences: list[list[int]], k: int, min_n: int, max_n: int, *, stale: int = 3
) -> list[list[int] | None]:
    """All sequences as rows of one batch, in other rows than 0..n-1, with stale tokens behind their ends."""
    longest = max(map(len, sequences))
    history = torch.full((len(sequences) + 2, longest + 6), stale, dtype=torch.int32)
    rows = torch.arange(len(sequences)).flip(0) + 1
    for row, tokens in zip(rows.tolist(), sequences, strict=True):
        history[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    token_ids, found = ngram_lookup_reference(
        history,
        rows,
        torch.tensor([len(tokens) for tokens in sequences]),
        max_len=longest,
        k=k,
        min_n=min_n,
        max_n=max_n,
    )
    return [row if ok else None for row, ok in zip(token_ids.tolist(), found.tolist(), strict=True)]


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_lookup_is_that_of_the_definition(min_n: int, max_n: int, k: int) -> None:
    generator = random.Random(k * 100 + min_n * 10 + max_n)
    sequences = [generator.choices(range(4), k=generator.randrange(1, 24)) for _ in range(200)]
    expected = [lookup_by_definition(tokens, k, min_n, max_n) for tokens in sequences]
    assert lookup(sequences, k, min_n, max_n) == expected
    assert any(item is None for item in expected)
    assert any(item is not None for item in expected)


def test_a_repetition_goes_on_beyond_what_is_known() -> None:
    assert lookup([[5, 6, 7, 5, 6, 7]], 7, 2, 4) == [[5, 6, 7, 5, 6, 7, 5]]
    assert lookup([[9, 9]], 3, 1, 1) == [[9, 9, 9]]


def test_the_longest_match_beats_the_latest_and_the_latest_beats_older_ones() -> None:
    assert lookup([[1, 2, 3, 7, 2, 3, 8, 1, 2, 3]], 1, 1, 3) == [[7]]
    assert lookup([[2, 3, 7, 2, 3, 8, 2, 3]], 1, 1, 3) == [[8]]


def test_a_sequence_of_one_token_and_one_without_a_match_have_none() -> None:
    assert lookup([[4], [1, 2, 3, 4]], 2, 1, 2) == [None, None]
