"""What top_k and top_p keep, against the definition in Python numbers, whichever way they take there."""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels.select_largest import select_largest_reference
from engine.kernels.top_k_top_p import PARTIAL_WIDTH, top_k_top_p, top_k_top_p_reference


def expected_ids(logits: list[float], top_k: int, top_p: float) -> list[int]:
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    order = order[:top_k] if top_k else order
    weights = [math.exp(logits[token_id] - logits[order[0]]) for token_id in order]
    total, mass = sum(weights), 0.0
    for count, weight in enumerate(weights, start=1):
        mass += weight
        if top_p < 1 and mass >= top_p * total:
            return order[:count]
    return order


def kept_ids(values: torch.Tensor, token_ids: torch.Tensor) -> list[list[int]]:
    return [ids[row > -math.inf].tolist() for row, ids in zip(values, token_ids, strict=True)]


@pytest.mark.parametrize(("width", "k"), [(13, 1), (13, 5), (13, 12), (13, 13), (3000, 700), (3000, 3000)])
def test_largest_are_ordered_by_value_then_id(width: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    values = torch.randint(0, 4, (20, width), generator=generator).float()  # many ties
    values[values == 0] = -math.inf
    largest, ids = select_largest_reference(values, k)
    for row, row_ids in zip(values.tolist(), ids.tolist(), strict=True):
        assert row_ids == sorted(range(width), key=lambda token_id: (-row[token_id], token_id))[:k]
    assert torch.equal(largest, values.gather(1, ids))


def test_kept_tokens_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    vocab_size, num_rows = 11, 400
    logits = torch.randn(num_rows, vocab_size, dtype=torch.float64, generator=generator) * 2
    logits[::4] = logits[::4].round()  # ties
    top_k = torch.randint(0, vocab_size + 3, (num_rows,), generator=generator)
    top_p = torch.rand(num_rows, dtype=torch.float64, generator=generator).clamp(min=1e-3)
    top_p[::5] = 1.0
    kept = kept_ids(*top_k_top_p(logits, top_k, top_p, vocab_size))
    for index in range(num_rows):
        assert kept[index] == expected_ids(logits[index].tolist(), int(top_k[index]), float(top_p[index]))


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 0.6, [0, 1]),  # 0.5 does not reach it, the token that crosses stays
        (2, 0.6, [0]),  # renormalised: 0.5 / 0.8 reaches it
        (0, 1e-9, [0]),  # one token stays
        (3, 1.0, [0, 1, 2]),  # of two equal tokens the lower id
        (9, 1.0, [0, 1, 2, 3]),  # more than there are: off
    ],
)
def test_examples(top_k: int, top_p: float, kept: list[int]) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]], dtype=torch.float64).log()
    result = top_k_top_p(logits, torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64), 4)
    assert kept_ids(*result) == [kept]


@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_looking_at_few_tokens_first_gives_the_same(scale: float) -> None:
    """Flat rows do not fit into the partial width, peaked ones do; a row never notices which was used."""
    vocab_size = 4 * PARTIAL_WIDTH
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1)) * scale
    logits[5] = 0.0
    logits[5, 17] = 12.0
    top_k = torch.tensor([0, 0, PARTIAL_WIDTH - 1, PARTIAL_WIDTH + 1, 2 * PARTIAL_WIDTH, 0])
    top_p = torch.tensor([0.9, 0.999, 0.95, 0.95, 1.0, 0.9])
    together = kept_ids(*top_k_top_p(logits, top_k, top_p, vocab_size))
    by_sorting = kept_ids(*top_k_top_p_reference(logits, top_k, top_p, vocab_size)[:2])
    alone = [
        kept_ids(*top_k_top_p(logits[row : row + 1], top_k[row : row + 1], top_p[row : row + 1], vocab_size))[
            0
        ]
        for row in range(6)
    ]
    assert together == by_sorting == alone


def test_prefix_that_reaches_top_p_exactly_is_enough() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    assert kept_ids(*top_k_top_p(logits, torch.tensor([0]), torch.tensor([0.5]), 3)) == [[0]]


def test_partial_result_says_whether_it_is_complete() -> None:
    logits = torch.zeros(4, 8)
    logits[1:, 0] = 50.0
    top_k, top_p = torch.tensor([0, 0, 5, 4]), torch.tensor([0.9, 0.9, 0.9, 0.9])
    *_, is_complete = top_k_top_p_reference(logits, top_k, top_p, width=4)
    assert is_complete.tolist() == [False, True, False, True]
