"""The default rule of verification, exhaustively for up to three drafts, against a loop."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from engine.kernels.emit_runs import Verification
from engine.kernels.emit_runs import verify_reference as verify
from tests.support.located_drafts import locate_drafts


@dataclass(frozen=True)
class Case:
    """One request: the tokens drawn at its logits rows, its drafts, and what bounds it."""

    drawn: tuple[int, ...]  # empty: does not sample
    drafts: tuple[int, ...] = ()  # as fed; one less than drawn
    num_valid: int = 0
    room: int = 99
    bad: tuple[bool, ...] = ()

    def expected(self) -> tuple[list[int], bool]:
        emitted: list[int] = []
        is_bad = False
        for index, token in enumerate(self.drawn[: self.room]):
            emitted.append(token)
            is_bad |= self.bad[index] if self.bad else False
            if index >= self.num_valid or self.drafts[index] != token:
                break
        return emitted, is_bad


def run(cases: list[Case], max_drafts: int) -> Verification:
    """Accept by equality, as the default rule does."""
    lengths = [len(case.drawn) for case in cases]
    token_ids = torch.tensor([token for case in cases for token in case.drawn], dtype=torch.int64)
    fed = [token for case in cases if case.drawn for token in (77, *case.drafts)]
    logits_start = torch.tensor([0, *itertools.accumulate(lengths)])
    drafts = locate_drafts(
        torch.tensor(fed, dtype=torch.int64),
        torch.repeat_interleave(torch.arange(len(cases)), torch.tensor(lengths)),
        logits_start,
        torch.tensor([case.num_valid for case in cases]),
    )
    return verify(
        token_ids=token_ids,
        is_bad=torch.tensor(
            [flag for case in cases for flag in case.bad or [False] * len(case.drawn)], dtype=torch.bool
        ),
        is_accepted=token_ids == drafts.token_ids,
        logits_start=logits_start,
        max_emitted=torch.tensor([case.room for case in cases], dtype=torch.int32),
        max_drafts=max_drafts,
    )


def check(cases: list[Case], max_drafts: int) -> None:
    result = run(cases, max_drafts)
    assert result.token_ids.shape == (len(cases), max_drafts + 1)
    for index, case in enumerate(cases):
        emitted, is_bad = case.expected()
        padding = [-1] * (max_drafts + 1 - len(emitted))
        assert result.token_ids[index].tolist() == emitted + padding, case
        assert result.num_emitted[index] == len(emitted), case
        num_matching = 0
        while num_matching < case.num_valid and case.drafts[num_matching] == case.drawn[num_matching]:
            num_matching += 1
        assert result.num_accepted[index] == num_matching, case
        assert result.is_bad[index] == is_bad, case


def all_patterns(num_drafts: int) -> list[Case]:
    """Each draft right or wrong, each number of valid ones, each room."""
    drawn = tuple(range(10, 11 + num_drafts))
    return [
        Case(drawn, tuple(t if right else 5 for t, right in zip(drawn, pattern, strict=False)), valid, room)
        for pattern in itertools.product((True, False), repeat=num_drafts)
        for valid in range(num_drafts + 1)
        for room in range(num_drafts + 2)
    ]


def test_worked_example() -> None:
    result = run([Case((5, 4, 2), (5, 6), 2), Case(()), Case((7, 3), (7,), 1)], max_drafts=2)
    assert result.token_ids.tolist() == [[5, 4, -1], [-1, -1, -1], [7, 3, -1]]
    assert result.num_emitted.tolist() == [2, 0, 2]
    assert result.num_accepted.tolist() == [1, 0, 1]


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_every_pattern_of_right_and_wrong_drafts(num_drafts: int) -> None:
    patterns = all_patterns(num_drafts)
    check(patterns, num_drafts)
    for case in patterns:
        check([case], num_drafts)


def test_ragged_batches_of_requests_that_sample_and_that_do_not() -> None:
    pool = [case for k in range(4) for case in all_patterns(k)] + [Case(())] * 40
    generator = random.Random(0)
    for _ in range(200):
        cases = generator.choices(pool, k=generator.randrange(1, 9))
        widest = max([len(case.drawn) - 1 for case in cases] + [0])
        check(cases, widest)
        check(cases, widest + 2)


def test_only_bad_rows_of_the_emitted_run_count() -> None:
    check(
        [
            Case((1, 2, 3), (1, 9), 2, bad=(False, False, True)),  # behind the rejection
            Case((1, 2, 3), (1, 9), 2, bad=(False, True, False)),
            Case((1, 2, 3), (1, 2), 2, bad=(False, False, True)),
            Case((1, 2, 3), (1, 2), 2, room=2, bad=(False, False, True)),  # behind the room
        ],
        max_drafts=2,
    )


def test_each_draft_is_located_at_the_row_that_decides_about_it() -> None:
    """The example of VerifiedDrafts."""
    drafts = locate_drafts(
        torch.tensor([9, 5, 6, 8, 7]),
        torch.tensor([0, 0, 0, 2, 2]),
        torch.tensor([0, 3, 3, 5]),
        torch.tensor([2, 0, 0]),
    )
    assert drafts.token_ids.tolist() == [5, 6, -1, -1, -1]
    assert drafts.steps.tolist() == [0, 1, 2, 0, 1]
    assert drafts.is_draft.tolist() == [True, True, False, False, False]


def test_accepted_drafts_count_where_the_run_has_no_room_for_them() -> None:
    result = run([Case((5, 6, 2), (5, 6), 2, room=1)], max_drafts=2)
    assert result.token_ids.tolist() == [[5, -1, -1]]
    assert result.num_emitted.tolist() == [1]
    assert result.num_accepted.tolist() == [2]


def test_step_in_which_nobody_samples() -> None:
    result = run([Case(()), Case(())], max_drafts=0)
    assert result.token_ids.tolist() == [[-1], [-1]]
    assert result.num_emitted.tolist() == result.num_accepted.tolist() == [0, 0]
    assert result.is_bad.tolist() == [False, False]
