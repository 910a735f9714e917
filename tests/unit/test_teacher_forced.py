"""benchmarks/teacher_forced.py: verifications worked out by hand, and against a brute-force run of the same rounds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks import teacher_forced
from benchmarks.teacher_forced import GreedyReference, simulate
from tests.support.smollm2 import smollm2_gguf, smollm2_reference


def lengths(text: list[int], choices: list[int], k: int, max_tokens: int) -> list[int]:
    return [seen.num_emitted for seen in simulate(text, choices, k, max_tokens, "draft_model")]


def test_the_example_of_the_docstring() -> None:
    (seen,) = simulate([5, 6, 7, 8, 9], [0, 6, 7, 1, 9], 3, 5, "draft_model")
    assert (seen.method, seen.num_drafted, seen.num_accepted, seen.num_emitted) == ("draft_model", 3, 2, 3)


def test_rounds_by_hand() -> None:
    # Positions          0  1  2  3  4  5  6  7  8  9
    text = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    choices = [9, 1, 2, 3, 4, 0, 6, 0, 8, 0]
    # From 1: 1 2 3 right, 4 from the target. From 5: wrong at once. From 6: 6 right, 7 from the target.
    # From 8: room for one draft beside the target's token: 8 right, 9 from the target.
    assert lengths(text, choices, k=3, max_tokens=10) == [4, 1, 2, 2]


def test_always_right_is_k_plus_one_and_always_wrong_is_one() -> None:
    text = list(range(41))
    assert lengths(text, text, k=4, max_tokens=41) == [5] * 8
    assert set(lengths(text, [-1] * 41, k=4, max_tokens=41)) == {1}


def test_a_text_that_ends_with_an_accepted_draft_has_no_token_after_it() -> None:
    (seen,) = simulate([1, 2, 3], [0, 2, 3], 3, 20, "draft_model")
    assert (seen.num_drafted, seen.num_accepted, seen.num_emitted) == (3, 2, 2)


@pytest.mark.parametrize("length", [1, 2])
def test_nothing_is_drafted_where_there_is_no_room(length: int) -> None:
    text = list(range(length))
    assert lengths(text, text, k=3, max_tokens=length) == []


def chained_rounds(
    text: list[int], drafter: dict[tuple[int, ...], int], k: int, max_tokens: int
) -> list[int]:
    """Drafts made one after the other from the drafter's own tokens, as a real one makes them."""
    emitted = []
    position = 1
    while position < len(text) and (num_drafts := min(k, max_tokens - position - 1)) > 0:
        chain: list[int] = []
        for _ in range(num_drafts):
            chain.append(drafter.get((*text[:position], *chain), -1))
        num_right = 0
        while num_right < num_drafts and text[position + num_right : position + num_right + 1] == [
            chain[num_right]
        ]:
            num_right += 1
        emitted.append(min(num_right + 1, len(text) - position))
        position += emitted[-1]
    return emitted


@pytest.mark.parametrize("seed", range(20))
def test_one_pass_over_the_text_gives_what_chains_of_own_drafts_give(seed: int) -> None:
    source = random.Random(seed)
    text = [source.randrange(3) for _ in range(30)]
    drafter = {tuple(text[:end]): source.choice([text[end], source.randrange(3)]) for end in range(30)}
    choices = [drafter[tuple(text[:end])] for end in range(30)]
    k = source.randint(1, 5)
    max_tokens = source.choice([30, 31, 50])
    assert lengths(text, choices, k, max_tokens) == chained_rounds(text, drafter, k, max_tokens)


def test_the_reference_chooses_what_it_generates_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_forced, "load_gguf_reference", lambda *arguments: smollm2_reference())
    reference = GreedyReference(Path(smollm2_gguf()), torch.float32)
    prompt = [1, 4093, 198, 1780]
    text: list[int] = []
    for _ in range(4):
        text.append(reference.choices(prompt, [*text, 0])[-1])
    assert reference.choices(prompt, text) == text
