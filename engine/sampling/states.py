"""Sampling parameters of the request rows, on the device, and on the host which rows use what.

It knows nothing of logits: engine/sampling/sampler.py reads the tables. All are indexed by request row and
are only meaningful in rows whose request uses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.device import to_device
from engine.kernels.truncation import RowTables
from engine.params import MAX_BAD_WORD_TOKENS, SamplingParams
from engine.sampling.features import (
    BatchFeatures,
    RowTraits,
    SamplingKind,
    batch_features,
    most_general,
    row_traits,
)
from engine.sampling.row_table import RowTable
from engine.step import NewRow

ALWAYS = 2**31 - 1  # an output index that no request reaches


class SamplingStates:
    """Written by `set_row` when a request gets its row; never changed while it runs."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._max_num_rows = max_num_rows
        self._traits: dict[int, RowTraits] = {}
        self._whole_step_kinds: dict[int, SamplingKind | None] = {}  # None: no whole step draws for the row

        # One copy per row and table; the names are views of the columns.
        self._integers = torch.zeros(max_num_rows, 2, dtype=torch.int64, device=device)
        self.seeds, self.top_k = self._integers.unbind(1)  # [rows] int64
        self._reals = torch.zeros(max_num_rows, 6, dtype=torch.float64, device=device)
        self.temperature, self.top_p, self.min_p = self._reals[:, :3].unbind(1)  # [rows] float64
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = self._reals[:, 3:].unbind(1)
        self.draw_tables = RowTables(
            seeds=self.seeds,
            top_k=self.top_k,
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
        )

        # What is added to the logit of bias_ids while the output index is below bias_end; padding adds 0 to
        # id 0.
        self.bias_ids = RowTable(max_num_rows, 0, np.int64, device)
        self.bias_values = RowTable(max_num_rows, 0.0, np.float64, device)
        self.bias_ends = RowTable(max_num_rows, 0, np.int64, device)
        # MAX_BAD_WORD_TOKENS ids per word, aligned to the right, -1 before the word and in unused words.
        self.bad_words = RowTable(max_num_rows, -1, np.int64, device, unit=MAX_BAD_WORD_TOKENS)
        # [rows, vocab_size] bool; made when the first request asks, for few ever do.
        self.allowed_ids: torch.Tensor | None = None

    def set_row(self, new: NewRow) -> None:
        """Take over the parameters of a request. No host sync."""
        row, params = new.row, new.params
        traits = row_traits(params, self.vocab_size)
        self._traits[row] = traits
        has_own_way = traits.changes_logits or traits.num_logprobs is not None
        self._whole_step_kinds[row] = None if has_own_way else traits.kind
        integers = np.array([params.seed, params.top_k], dtype=np.int64)
        reals = np.array(
            [
                params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ],
            dtype=np.float64,
        )
        self._integers[row].copy_(to_device(integers, self.device), non_blocking=True)
        self._reals[row].copy_(to_device(reals, self.device), non_blocking=True)
        if traits.uses_bias:
            entries = _bias_entries(params, new.stop_ids)
            self.bias_ids.set_row(row, [token_id for token_id, _, _ in entries])
            self.bias_values.set_row(row, [value for _, value, _ in entries])
            self.bias_ends.set_row(row, [end for _, _, end in entries])
        if traits.uses_bad_words:
            self.bad_words.set_row(row, _aligned_words(params.bad_words))
        if traits.uses_allowed_ids:
            self._set_allowed_ids(row, params.allowed_token_ids)

    def features(self, rows: Sequence[int]) -> BatchFeatures:
        """What the step needs. `rows`: the request row of each *logits row*, in their order."""
        return batch_features([self._traits[row] for row in rows], self.device)

    def sampling_kind(self, row: int) -> SamplingKind | None:
        """How the row's request draws; None: out of logits that have to be changed first."""
        traits = self._traits[row]
        return None if traits.changes_logits else traits.kind

    def common_kind(self, rows: Iterable[int]) -> SamplingKind | None:
        """The simplest kind by which a step can draw for all of them; None: one of them wants log probabilities, or
        draws out of logits that have to be changed first.
        """
        kinds = {self._whole_step_kinds[row] for row in rows}
        known = [kind for kind in kinds if kind is not None]
        return most_general(known) if len(known) == len(kinds) else None

    def _set_allowed_ids(self, row: int, token_ids: Sequence[int]) -> None:
        if self.allowed_ids is None:
            self.allowed_ids = torch.zeros(
                self._max_num_rows, self.vocab_size, dtype=torch.bool, device=self.device
            )
        allowed = np.zeros(self.vocab_size, dtype=np.bool_)
        allowed[list(token_ids)] = True
        self.allowed_ids[row].copy_(to_device(allowed, self.device), non_blocking=True)


def _bias_entries(params: SamplingParams, stop_ids: Sequence[int]) -> list[tuple[int, float, int]]:
    """(token id, value to add, output index from which on it is not added any more)."""
    never = float("-inf")
    entries = [(token_id, bias, ALWAYS) for token_id, bias in params.logit_bias.items()]
    entries += [(word[0], never, ALWAYS) for word in params.bad_words if len(word) == 1]
    if params.min_tokens > 0:
        entries += [(token_id, never, params.min_tokens) for token_id in stop_ids]
    return entries


def _aligned_words(words: Sequence[Sequence[int]]) -> list[int]:
    """[[7, 8]] -> [-1, ..., -1, 7, 8]. Words of one token are in the bias table."""
    aligned: list[int] = []
    for word in words:
        if len(word) > 1:
            aligned += [-1] * (MAX_BAD_WORD_TOKENS - len(word)) + list(word)
    return aligned
