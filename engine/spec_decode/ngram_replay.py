"""Prompt lookup on the host: the drafts of engine/kernels/ngram_lookup.py, token by token instead of all at once."""

from __future__ import annotations

from collections.abc import Sequence

from engine.spec_decode.replay import LookupReplay


class NgramReplay(LookupReplay):
    """Example, min_n 2, after reading [1, 2, 3, 9, 1, 2, 3]: what follows (1, 2, 3) stands from position 3 on, so the
    drafts are 9, 1, 2, 3, 9, ...
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n
        self._token_ids: list[int] = []
        self._next_positions: dict[tuple[int, ...], int] = {}  # n-gram -> what follows its latest occurrence

    def read(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._enter_tail()
            self._token_ids.append(token_id)

    def propose(self, max_drafts: int) -> list[int]:
        known = self._token_ids
        for n in range(min(self._max_n, len(known)), self._min_n - 1, -1):
            first = self._next_positions.get(tuple(known[-n:]))
            if first is not None:
                period = len(known) - first
                return [known[first + step % period] for step in range(max_drafts)]
        return []

    def _enter_tail(self) -> None:
        """Only now that a token follows: a tail is no earlier occurrence of itself."""
        end = len(self._token_ids)
        for n in range(self._min_n, min(self._max_n, end) + 1):
            self._next_positions[tuple(self._token_ids[end - n : end])] = end
