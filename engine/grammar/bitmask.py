"""The tokens that a step may draw for requests with a grammar: one mask for each draft position.

Row j of a request stands behind its drafts 0..j-1. Where these do not fit the grammar, or complete it, the row decides
about nothing that is emitted, and allows everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from engine.grammar.matcher import GrammarMatcher

WORD_BITS = 32

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class MaskedRequest:
    """One request of a step."""

    matcher: GrammarMatcher
    num_rows: int  # 1 + planned drafts
    draft_ids: Sequence[int]  # that will be verified, at most num_rows - 1
    stop_ids: Sequence[int]  # what may end it


class MaskMaker:
    """One per engine. `vocab_size` is the model's."""

    def __init__(self, vocab_size: int) -> None:
        self._end_bit = vocab_size  # "the output may end here": engine/grammar/vocabulary.py
        self._num_words = -(-(vocab_size + 1) // WORD_BITS)
        self._only_end = np.zeros(self._num_words, dtype=np.uint32)
        _set(self._only_end, self._end_bit)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()  # has threads

    def make(self, requests: Sequence[MaskedRequest]) -> tuple[Words, list[int]]:
        """Masks [sum of num_rows, words] in the order of `requests`, bit b of word w is token 32 * w + b; and how many
        leading drafts of each request they let pass.
        """
        masks = np.full(
            (sum(item.num_rows for item in requests), self._num_words), 2**32 - 1, dtype=np.uint32
        )
        plain, drafted = [], []
        first = 0
        for item in requests:
            if item.matcher.error:
                masks[first] = 0  # the request fails
            elif item.draft_ids:
                drafted.append((item.matcher.native, first, list(item.draft_ids)))
            else:
                plain.append((item.matcher.native, first))
            first += item.num_rows
        address, num_bytes, num_rows = masks.ctypes.data, masks.strides[0], len(masks)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, address, num_bytes, num_rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, address, num_bytes, num_rows)
        nums_allowed = []
        first = 0
        for item in requests:
            rows = masks[first : first + item.num_rows]
            self._add_ends(rows, item.stop_ids)
            nums_allowed.append(_num_allowed(rows, item.draft_ids))
            first += item.num_rows
        return masks, nums_allowed

    def _add_ends(self, rows: Words, stop_ids: Sequence[int]) -> None:
        """Where the output may end, the request's stop ids may stand. Where it has to, behind a draft, it has ended."""
        for index, row in enumerate(rows):
            if not _is_allowed(row, self._end_bit):
                continue
            if index > 0 and np.array_equal(row, self._only_end):
                row.fill(2**32 - 1)
            for token_id in stop_ids:
                _set(row, token_id)


def _num_allowed(rows: Words, draft_ids: Sequence[int]) -> int:
    for index, token_id in enumerate(draft_ids):
        if not _is_allowed(rows[index], token_id):
            return index
    return len(draft_ids)


def _is_allowed(row: Words, token_id: int) -> bool:
    word, bit = divmod(token_id, WORD_BITS)
    return bool((int(row[word]) >> bit) & 1)


def _set(row: Words, token_id: int) -> None:
    word, bit = divmod(token_id, WORD_BITS)
    row[word] |= np.uint32(1 << bit)
