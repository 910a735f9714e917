"""Where a sequence's tail occurred before, and what followed there: the data structure of suffix decoding.

A suffix tree of bounded memory, kept as an index of anchors: every occurrence of the last `min_match` tokens is
listed, and a lookup extends the occurrences backwards to the longest match and forwards to the likely continuation.
That gives what a walk down a suffix tree gives (longest match, child counts) at a few hundred bytes a token, and
removing a sequence is as cheap as adding it. Idea: Oliaro et al. 2024 (arXiv:2411.04975). Torch-free.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

MAX_OCCURRENCES = 64  # newest ones of an anchor that a lookup reads


class Continuation(NamedTuple):
    """`score`: the expected number of accepted tokens, by the counts."""

    token_ids: list[int]
    score: float


NOTHING = Continuation([], 0.0)


class _Text:
    """One indexed sequence. Identity is what distinguishes two of them."""

    __slots__ = ("token_ids",)

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids


class SuffixIndex:
    """Sequences that are added at the end and removed at the front, oldest first.

    Example, min_match 2, after adding [5, 6, 7, 5, 6, 8]: the anchor (5, 6) occurs before positions 2 and 5; for a tail
    [9, 5, 6] both match two tokens, and the children 7 and 8 have a probability of 1/2 each.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._texts: deque[_Text] = deque()
        self._occurrences: dict[
            tuple[int, ...], deque[tuple[_Text, int]]
        ] = {}  # anchor -> (text, next position)

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    @property
    def num_anchors(self) -> int:
        """Different ones."""
        return len(self._occurrences)

    def add(self, token_ids: Sequence[int]) -> None:
        self._texts.append(_Text([]))
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the sequence that was added last."""
        text = self._texts[-1]
        first_new = len(text.token_ids) + 1
        text.token_ids += token_ids
        for position in range(max(first_new, self._min_match), len(text.token_ids) + 1):
            anchor = tuple(text.token_ids[position - self._min_match : position])
            self._occurrences.setdefault(anchor, deque()).append((text, position))

    def remove_oldest(self) -> None:
        """Its occurrences stand first everywhere."""
        text = self._texts.popleft()
        for position in range(self._min_match, len(text.token_ids) + 1):
            anchor = tuple(text.token_ids[position - self._min_match : position])
            occurrences = self._occurrences[anchor]
            occurrences.popleft()
            if not occurrences:
                del self._occurrences[anchor]

    def continue_tail(self, tail: Sequence[int], max_tokens: int, min_probability: float) -> Continuation:
        """The likeliest continuation of the longest match of `tail`'s end, as long as its probability, the product
        of count(child) / count(parent), is at least `min_probability`.
        """
        alive = self._longest_matches(tail)
        token_ids: list[int] = []
        probability, score = 1.0, 0.0
        while alive and len(token_ids) < max_tokens:
            # Ties go to the newest occurrence; Counter keeps the order of insertion.
            children = Counter(
                text.token_ids[position] for text, position in alive if position < len(text.token_ids)
            )
            if not children:
                break
            child, count = children.most_common(1)[0]
            probability *= count / children.total()
            if probability < min_probability:
                break
            score += probability
            token_ids.append(child)
            alive = [
                (text, position + 1)
                for text, position in alive
                if position < len(text.token_ids) and text.token_ids[position] == child
            ]
        return Continuation(token_ids, score)

    def _longest_matches(self, tail: Sequence[int]) -> list[tuple[_Text, int]]:
        """Occurrences that share the longest end with the tail and have a next token, newest first."""
        if len(tail) < self._min_match:
            return []
        occurrences = self._occurrences.get(tuple(tail[-self._min_match :]), ())
        best: list[tuple[_Text, int]] = []
        best_length = 0
        for index, (text, position) in enumerate(reversed(occurrences)):
            if index == MAX_OCCURRENCES:
                break
            if position == len(text.token_ids):
                continue
            length = self._match_length(tail, text.token_ids, position)
            if length > best_length:
                best, best_length = [], length
            if length == best_length:
                best.append((text, position))
        return best

    def _match_length(self, tail: Sequence[int], token_ids: Sequence[int], end: int) -> int:
        """How many tokens before `end` equal the tail's last ones, at most `max_match`."""
        limit = min(len(tail), end, self._max_match)
        length = self._min_match
        while length < limit and tail[-1 - length] == token_ids[end - 1 - length]:
            length += 1
        return length
