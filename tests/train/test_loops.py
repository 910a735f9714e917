"""Where a text only repeats itself."""

from __future__ import annotations

import numpy as np
import pytest

from tools.train.loops import loop_start


@pytest.mark.parametrize("period", [1, 3, 40, 96])
def test_a_loop_is_kept_once(period: int) -> None:
    text = list(range(1000, 1050))
    once = list(range(period))
    assert loop_start(text + once * 30) == len(text) + period


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_short_repetition_is_none(repeats: int) -> None:
    text = [*range(100), *[1, 2, 3] * (1 + repeats)]
    assert loop_start(text) == len(text)


def test_a_loop_that_the_text_left_again_is_none() -> None:
    text = [*[1, 2, 3] * 30, 4, 5, 6]
    assert loop_start(text) == len(text)


@pytest.mark.parametrize("length", [0, 1, 2, 300])
def test_text_without_repetition_is_whole(length: int) -> None:
    text = np.random.default_rng(0).permutation(length).tolist()
    assert loop_start(text) == length
