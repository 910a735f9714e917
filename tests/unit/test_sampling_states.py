"""Rows are refilled completely, tables grow, and what no row of a step uses is switched off."""

from __future__ import annotations

import torch

from engine.batch.request_rows import RequestRows
from engine.params import MAX_BAD_WORD_TOKENS, SamplingParams
from engine.sampling.sampler import SampleBatch, Sampler
from engine.sampling.states import SamplingStates
from engine.step import NewRow
from tests.support.sampling_reference import CPU, params

VOCAB = 40


def new_row(row: int, asked: SamplingParams, stop_ids: tuple[int, ...] = ()) -> NewRow:
    return NewRow(
        row=row,
        request_id=str(row),
        token_ids=[1, 2],
        num_prompt_tokens=2,
        num_computed_tokens=0,
        token_limit=20,
        params=asked,
        stop_ids=stop_ids,
    )


def draw(states: SamplingStates, rows: list[int], logits: torch.Tensor) -> list[int]:
    request_rows = RequestRows(4, 20, 0, CPU)
    for row in rows:
        request_rows.set_row(new_row(row, params()))
    batch = SampleBatch(
        rows=torch.tensor(rows),
        positions=torch.full((len(rows),), 2),
        request_rows=request_rows,
        states=states,
        features=states.features(rows),
    )
    return Sampler().sample(logits, batch).token_ids.tolist()


def descending_logits(num_rows: int) -> torch.Tensor:
    """Greedy draws the lowest id that is not masked."""
    return torch.arange(VOCAB, 0, -1).float().expand(num_rows, -1)


def test_next_request_of_a_row_inherits_nothing() -> None:
    states = SamplingStates(4, VOCAB, CPU)
    masking = params(
        temperature=0.0,
        min_tokens=3,
        logit_bias={0: -100.0},
        bad_words=((1,), (2, 2), (1, 2, 3)),
        allowed_token_ids=(4, 5),
    )
    states.set_row(new_row(1, masking, stop_ids=(4,)))
    assert draw(states, [1], descending_logits(1)) == [5]
    states.set_row(new_row(1, params(temperature=0.0, logit_bias={3: 0.0}, bad_words=((2, 7),))))
    assert draw(states, [1], descending_logits(1)) == [0]
    states.set_row(new_row(1, params(temperature=0.0, allowed_token_ids=(9,))))
    assert draw(states, [1], descending_logits(1)) == [9]


def test_tables_grow_and_keep_the_rows_that_are_there() -> None:
    states = SamplingStates(4, VOCAB, CPU)
    states.set_row(new_row(0, params(temperature=0.0, logit_bias={0: -100.0}, bad_words=((2, 1),))))
    many = params(
        temperature=0.0,
        logit_bias=dict.fromkeys(range(20), -100.0),
        bad_words=tuple((2, token_id) for token_id in range(20, 30)),
    )
    states.set_row(new_row(3, many))
    assert states.bad_words.data.shape == (4, 16 * MAX_BAD_WORD_TOKENS)
    assert draw(states, [0, 3, 0], descending_logits(3)) == [2, 30, 2]


def test_unused_features_are_off() -> None:
    states = SamplingStates(4, VOCAB, CPU)
    states.set_row(new_row(0, params(temperature=0.0)))
    states.set_row(new_row(1, params(presence_penalty=1.0, logprobs=0)))
    states.set_row(new_row(2, params(top_k=7, logprobs=3)))
    plain = states.features([0, 0])
    assert not plain.changes_logits
    assert plain.random_groups == ()
    assert plain.logprobs is None
    mixed = states.features([0, 1, 1, 2])
    assert mixed.penalties is not None
    assert list(mixed.penalties.indices) == [1, 2]
    assert mixed.allowed_ids is mixed.bias is mixed.bad_words is None
    assert [list(group.rows.indices) for group in mixed.random_groups] == [[1, 2], [3]]
    assert [group.num_candidates for group in mixed.random_groups] == [None, 7]
    assert mixed.logprobs is not None
    assert list(mixed.logprobs.indices) == [1, 2, 3]
    assert mixed.max_logprobs == 3


def test_neutral_values_switch_off() -> None:
    states = SamplingStates(1, VOCAB, CPU)
    states.set_row(new_row(0, params(top_k=VOCAB, top_p=1.0, min_p=0.0, repetition_penalty=1.0)))
    features = states.features([0])
    assert not features.changes_logits
    assert [(group.num_candidates, group.any_min_p) for group in features.random_groups] == [(None, False)]


def test_all_rows_selected_needs_no_gather() -> None:
    states = SamplingStates(2, VOCAB, CPU)
    states.set_row(new_row(0, params()))
    (group,) = states.features([0, 0, 0]).random_groups
    assert group.rows.index is None
    assert list(group.rows.indices) == [0, 1, 2]
