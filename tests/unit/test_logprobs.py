"""Log probabilities are those of the raw distribution, with ranks by definition, for the rows that ask."""

from __future__ import annotations

import math

import pytest
import torch

from engine.sampling.logprobs import LogprobsTensors, compute_logprobs
from tests.support.sampling_reference import Request, params, sample

VOCAB = 9


def logits_of(num_rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    values = torch.randn(num_rows, VOCAB, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * 2
    values[::3] = values[::3].round()  # ties
    return values


def expected(logits: list[float], token_id: int, num_top: int) -> tuple[tuple[int, float, int], list[object]]:
    total = math.log(sum(math.exp(value) for value in logits))

    def entry(token: int) -> tuple[int, float, int]:
        return token, logits[token] - total, 1 + sum(value > logits[token] for value in logits)

    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    return entry(token_id), [entry(token) for token in order[:num_top]]


def check(tensors: LogprobsTensors, logits: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    positions = tensors.to_positions(0, len(token_ids), num_top)
    assert len(positions) == len(token_ids)
    for row, position in enumerate(positions):
        token, top = expected(logits[row].tolist(), token_ids[row], num_top)
        got = [(entry.token_id, entry.logprob, entry.rank) for entry in (position.token, *position.top)]
        for ours, theirs in zip(got, [token, *top], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("num_top", [0, 1, 4, VOCAB, 20])
def test_values_and_ranks_are_those_of_the_definition(num_top: int) -> None:
    logits = logits_of(30)
    token_ids = [row % VOCAB for row in range(30)]
    tensors = compute_logprobs(logits, torch.tensor(token_ids), num_top)
    check(tensors, logits, token_ids, num_top)
    assert tensors.logprobs.dtype == torch.float64


def test_each_position_shows_as_many_as_it_asked_for() -> None:
    tensors = compute_logprobs(logits_of(3), torch.tensor([0, 1, 2]), 5)
    assert [len(position.top) for position in tensors.to_positions(1, 2, 3)] == [3, 3]
    assert [position.top for position in tensors.to_positions(0, 1, 0)] == [[]]
    assert tensors.to_positions(2, 0, 3) == []


def test_pieces_of_a_prompt_join_to_the_whole() -> None:
    logits, token_ids = logits_of(7), torch.tensor([8, 7, 6, 5, 4, 3, 2])
    parts = [compute_logprobs(logits[a:b], token_ids[a:b], 3) for a, b in ((0, 1), (1, 5), (5, 7))]
    whole = LogprobsTensors.concatenate(parts)
    assert whole.num_rows == 7
    assert whole.to_positions(0, 7, 3) == compute_logprobs(logits, token_ids, 3).to_positions(0, 7, 3)


def test_row_alone_is_bit_equal_to_row_in_a_batch() -> None:
    logits = torch.randn(16, 5003, generator=torch.Generator().manual_seed(1)) * 4
    token_ids = torch.arange(16) * 300
    whole = compute_logprobs(logits, token_ids, 20).to_positions(0, 16, 20)
    for row in range(16):
        alone = compute_logprobs(logits[row : row + 1], token_ids[row : row + 1], 20).to_positions(0, 1, 20)
        assert alone == whole[row : row + 1]


def test_sampler_reports_the_raw_distribution_of_the_rows_that_ask() -> None:
    """Known fault 46: one entry per token, untouched by penalties, masks and temperature."""
    requests = [
        Request(params(temperature=0.0)),
        Request(params(seed=4, temperature=0.2, top_k=3, logprobs=2), (0,), (5, 6)),
        Request(params(temperature=0.0, logprobs=5, allowed_token_ids=(7,), presence_penalty=1.0)),
    ]
    draws = [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1)]
    logits = logits_of(5)
    result = sample(requests, logits, draws)
    tensors = result.logprobs
    assert tensors is not None
    assert list(tensors.logits_rows) == [1, 2, 3, 4]
    drawn = result.token_ids.tolist()
    assert drawn[4] == 7
    for first, count, num_top in ((1, 3, 2), (1, 2, 2), (4, 1, 5)):
        for offset, position in enumerate(tensors.to_positions(first, count, num_top)):
            row = first + offset
            token, top = expected(logits[row].tolist(), drawn[row], num_top)
            assert (position.token.token_id, position.token.rank) == (token[0], token[2])
            assert position.token.logprob == pytest.approx(token[1])
            assert [entry.token_id for entry in position.top] == [entry[0] for entry in top]  # type: ignore[index]


def test_map_moves_every_tensor() -> None:
    tensors = compute_logprobs(logits_of(2), torch.tensor([1, 2]), 2)
    seen: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor.clone()

    assert tensors.map(copy).to_positions(0, 2, 2) == tensors.to_positions(0, 2, 2)
    assert len(seen) == 6
