"""Finds where a text begins to repeat itself word by word: greedy answers of small models often end in a loop.

A drafter learns nothing from the tenth time round, and on held-out text a loop, which every drafter guesses, hides what
it does elsewhere. A target would learn to loop.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_PERIOD = 96  # tokens
_MIN_REPEATED = 24  # tokens: less is a list, a rhyme, or a name said twice


def loop_start(token_ids: Sequence[int]) -> int:
    """Number of tokens in front of what only repeats, up to the end, the tokens before it; all, if nothing does.

    Example, were three repeated tokens enough: [5, 1, 2, 1, 2, 1] -> 3, for from there on each token is the one of two
    places before.
    """
    first = len(token_ids)
    for period in range(1, min(_MAX_PERIOD, len(token_ids) - 1) + 1):
        start = len(token_ids)
        while start > period and token_ids[start - 1] == token_ids[start - 1 - period]:
            start -= 1
        if len(token_ids) - start >= max(_MIN_REPEATED, period):
            first = min(first, start)
    return first
