"""Every row's token is the one of the definition, whatever the parameters, the neighbours and the drafts."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.support.sampling_reference import (
    Request,
    expected_distribution,
    expected_logits,
    expected_token,
    params,
    sample,
)

VOCAB = 13


def random_logits(num_rows: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB, dtype=dtype, generator=generator) * 3


def random_request(generator: random.Random) -> Request:
    """Each parameter is neutral in about half of the requests."""

    def maybe(value: object, neutral: object) -> object:
        return value if generator.random() < 0.5 else neutral

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(generator.choices(range(VOCAB), k=generator.randrange(low, high)))

    return Request(
        params(
            temperature=maybe(generator.choice([0.3, 1.0, 2.5, 1e-6]), 0.0),
            top_k=maybe(generator.randrange(1, VOCAB + 2), 0),
            top_p=maybe(generator.uniform(0.05, 1.0), 1.0),
            min_p=maybe(generator.uniform(0.0, 0.6), 0.0),
            repetition_penalty=maybe(generator.uniform(0.5, 2.0), 1.0),
            presence_penalty=maybe(generator.uniform(-2.0, 2.0), 0.0),
            frequency_penalty=maybe(generator.uniform(-2.0, 2.0), 0.0),
            logit_bias=maybe({t: generator.uniform(-5.0, 5.0) for t in tokens(1, 4)}, {}),
            bad_words=maybe(tuple(tokens(1, 4) for _ in range(generator.randrange(1, 6))), ()),
            allowed_token_ids=maybe(tuple({3, *tokens(4, 9)}), ()),
            min_tokens=maybe(generator.randrange(1, 8), 0),
            seed=generator.randrange(-(2**63), 2**63),
        ),
        prompt=tokens(1, 6),
        output=tokens(0, 8),
        stop_ids=tokens(0, 3),
    )


def draws_of(requests: list[Request], generator: random.Random) -> list[tuple[int, int]]:
    """Each request verifies some of its last output tokens as drafts."""
    draws = []
    for index, request in enumerate(requests):
        num_drafts = generator.randrange(len(request.output) + 1)
        end = len(request.history)
        draws += [(index, position) for position in range(end - num_drafts, end + 1)]
    return draws


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes_of_parameters_draw_the_tokens_of_the_definition(seed: int) -> None:
    generator = random.Random(seed)
    requests = [random_request(generator) for _ in range(16)]
    draws = draws_of(requests, generator)
    logits = random_logits(len(draws), seed)
    result = sample(requests, logits, draws)
    for index, (row, position) in enumerate(draws):
        values = logits[index].tolist()
        everything_is_masked = max(expected_logits(values, requests[row], position)) == -math.inf
        assert result.is_bad[index] == everything_is_masked
        expected = 0 if everything_is_masked else expected_token(values, requests[row], position)
        assert result.token_ids[index] == expected, (requests[row], position)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_row_alone_draws_what_it_draws_in_a_batch(dtype: torch.dtype) -> None:
    generator = random.Random(1)
    requests = [random_request(generator) for _ in range(12)]
    draws = draws_of(requests, generator)
    logits = random_logits(len(draws), 1, dtype)
    before = logits.clone()
    together = sample(requests, logits, draws).token_ids.tolist()
    alone = [
        int(sample(requests, logits[index : index + 1], [draw]).token_ids) for index, draw in enumerate(draws)
    ]
    assert together == alone
    assert torch.equal(logits, before)


def test_nothing_is_read_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has no values: whatever would wait for one raises."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    generator = random.Random(2)
    requests = [random_request(generator) for _ in range(30)] + [Request(params(logprobs=3))]
    draws = draws_of(requests, generator)
    result = sample(requests, torch.zeros(len(draws), VOCAB, device="meta"), draws)
    assert result.token_ids.shape == (len(draws),)
    assert result.logprobs is not None
    assert result.logprobs.top_ranks.shape == (1, 3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0, "top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.05, "logit_bias": {2: 1.5}},
    ],
)
def test_marginals_are_those_of_the_processed_distribution(settings: dict[str, object]) -> None:
    """Chi-square over 100,000 positions of one seed, and over as many seeds at one position."""
    size = 50_000
    logits = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    request = Request(params(seed=11, **settings))
    by_position = [(0, position) for position in range(1, size + 1)]
    probs = torch.tensor(expected_distribution(logits.tolist(), request, 1), dtype=torch.float64)
    counts = torch.bincount(
        sample([request], logits.expand(size, -1), by_position).token_ids, minlength=8
    ).double()
    counts += torch.bincount(
        sample(
            [Request(params(seed=seed, **settings)) for seed in range(size)], logits.expand(size, -1)
        ).token_ids,
        minlength=8,
    )
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = probs[possible] * 2 * size
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_greedy_rows_are_exact_whatever_their_neighbours() -> None:
    """Known fault 38."""
    logits = random_logits(1, 5, torch.float32).expand(6, -1).clone()
    requests = [
        Request(params(temperature=0.0)),
        Request(params(temperature=1.0, seed=1)),
        Request(params(temperature=1e-6, seed=2)),
        Request(params(temperature=0.0, top_k=1)),
        Request(params(temperature=1.0, top_k=1, seed=3)),
        Request(params(temperature=1e-45, top_p=0.5, seed=4)),
    ]
    largest = int(logits[0].argmax())
    token_ids = sample(requests, logits).token_ids.tolist()
    assert [token_ids[index] for index in (0, 2, 3, 4, 5)] == [largest] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_and_tiny_temperatures_do_not_overflow(dtype: torch.dtype) -> None:
    logits = torch.full((2, VOCAB), -1e38, dtype=dtype)
    logits[:, 4] = 1e38
    result = sample([Request(params(temperature=1e-6)), Request(params(temperature=1.0))], logits)
    assert result.token_ids.tolist() == [4, 4]
    assert not result.is_bad.any()


def test_lowest_id_wins_ties() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [5, 9]] = 2.0
    requests = [
        Request(params(temperature=0.0)),
        Request(params(top_k=1, seed=8)),
        Request(params(temperature=0.0, logit_bias={5: -1.0})),
    ]
    assert sample(requests, logits).token_ids.tolist() == [5, 5, 9]
    assert sample(requests[:1], logits[:1]).token_ids.tolist() == [5]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_row_is_flagged_and_touches_no_neighbour(poison: float, temperature: float) -> None:
    requests = [Request(params(temperature=temperature, seed=s, top_p=0.9, logprobs=2)) for s in range(4)]
    requests[3] = Request(params(temperature=temperature, seed=3))
    logits = random_logits(4, 2, torch.float32)
    clean = sample(requests, logits).token_ids
    logits[1, 6] = poison
    result = sample(requests, logits)
    assert result.is_bad.tolist() == [False, True, False, False]
    assert result.token_ids[1] == 0
    for index in (0, 2, 3):
        assert result.token_ids[index] == clean[index]


def test_nan_is_found_where_a_mask_would_hide_it() -> None:
    logits = random_logits(1, 0)
    logits[0, 7] = math.nan
    assert sample([Request(params(allowed_token_ids=(1, 2)))], logits).is_bad.tolist() == [True]


def test_row_with_nothing_left_is_bad() -> None:
    logits = random_logits(2, 0)
    masked = Request(params(allowed_token_ids=(4,), bad_words=((4,),)))
    result = sample([masked, Request(params(temperature=0.0))], logits)
    assert result.is_bad.tolist() == [True, False]
    assert result.token_ids.tolist() == [0, int(logits[1].argmax())]
    assert sample([Request(params())], torch.full((1, VOCAB), -math.inf)).is_bad.tolist() == [True]


def test_step_without_logits_rows_draws_nothing() -> None:
    result = sample([], torch.zeros(0, VOCAB), [])
    assert result.token_ids.shape == result.is_bad.shape == (0,)
    assert result.logprobs is None


def test_seed_and_position_decide_not_the_row() -> None:
    """Known fault 39: in another row, with other neighbours, a request draws the same; twins differ."""
    logits = torch.zeros(1, VOCAB).expand(40, -1)
    seeds = [7, 8] * 20
    requests = [
        Request(params(seed=seed), prompt=(0,) * (1 + index // 2)) for index, seed in enumerate(seeds)
    ]
    token_ids = sample(requests, logits).token_ids.tolist()
    reversed_ids = sample(requests[::-1], logits).token_ids.tolist()[::-1]
    assert token_ids == reversed_ids
    assert token_ids[0::2] != token_ids[1::2]


def test_end_tokens_are_masked_for_output_indices_below_min_tokens_at_every_draft() -> None:
    """Known fault 9: min_tokens 5, drafts at output indices 3..6."""
    request = Request(params(temperature=0.0, min_tokens=5), (1, 2), (9,) * 7, stop_ids=(6,))
    logits = torch.zeros(5, VOCAB)
    logits[:, 6], logits[:, 4] = 9.0, 3.0
    positions = [(0, len(request.prompt) + index) for index in (3, 4, 5, 6, 7)]
    assert sample([request], logits, positions).token_ids.tolist() == [4, 4, 6, 6, 6]


def test_penalties_count_the_drafts_before_a_position_and_none_behind_it() -> None:
    """Known fault 41."""
    request = Request(params(temperature=0.0, presence_penalty=2.0), (5,), (8, 3, 3))
    logits = torch.zeros(4, VOCAB)
    logits[:, 3], logits[:, 7], logits[:, 8] = 2.0, 1.0, 1.5
    draws = [(0, position) for position in (1, 2, 3, 4)]
    assert sample([request], logits, draws).token_ids.tolist() == [3, 3, 7, 7]


def test_bias_and_min_p_hold_at_every_draft() -> None:
    """Known fault 42."""
    request = Request(params(logit_bias={3: -100.0}, min_p=0.3, seed=1), (5,), (3, 3, 3))
    logits = torch.tensor([0.0, 1.0, 1.1, 9.0, -1.0]).expand(400, -1)
    draws = [(0, 1 + index % 4) for index in range(400)]
    token_ids = sample([request], logits, draws).token_ids
    assert set(token_ids.tolist()) <= {0, 1, 2}
    many = [Request(request.params, (5,) * (1 + index)) for index in range(50)]
    assert set(sample(many, logits[:50]).token_ids.tolist()) == {0, 1, 2}


def test_draft_ids_outside_the_vocabulary_harm_nobody() -> None:
    request = Request(
        params(temperature=0.0, repetition_penalty=2.0, frequency_penalty=1.0, bad_words=((2, 4),)),
        (2,),
        (-1, VOCAB, 10**6),
    )
    logits = random_logits(4, 9)
    draws = [(0, position) for position in (1, 2, 3, 4)]
    result = sample([request], logits, draws)
    assert not result.is_bad.any()
    assert int(result.token_ids[0]) == expected_token(logits[0].tolist(), request, 1)


def test_min_p_of_one_keeps_the_most_likely_tokens() -> None:
    logits = torch.tensor([0.0, 2.0, 1.9, 2.0]).expand(200, -1)
    requests = [Request(params(min_p=1.0, seed=seed)) for seed in range(200)]
    assert set(sample(requests, logits).token_ids.tolist()) == {1, 3}


def test_bad_word_longer_than_the_history_matches_nothing() -> None:
    """What stands before the beginning is no token, and neither is the padding of shorter lists."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 1.0
    words = ((0, 1, 3), (1, 1, 3), (VOCAB - 1, 1, 3))
    request = Request(params(temperature=0.0, bad_words=words), (1,))
    assert sample([request], logits).token_ids.tolist() == [3]
    zeros = Request(params(temperature=0.0, bad_words=((5, 6),)), (0,) * 40)
    assert sample([request, zeros], torch.zeros(1, VOCAB), [(1, 40)]).token_ids.tolist() == [0]


def test_a_bad_word_may_begin_with_the_very_first_token() -> None:
    request = Request(params(temperature=0.0, bad_words=((1, 2, 3),)), (1,), (2,))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 6] = 2.0, 1.0
    assert sample([request], logits).token_ids.tolist() == [6]


def test_bad_word_is_never_completed_across_prompt_and_output() -> None:
    request = Request(params(temperature=0.0, bad_words=((1, 2, 3), (9, 3), (2, 5))), (0, 1), (2,))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 5], logits[0, 6] = 3.0, 2.0, 1.0
    assert sample([request], logits).token_ids.tolist() == [6]
    shorter = Request(request.params, (1,), ())
    assert sample([shorter], logits).token_ids.tolist() == [3]
