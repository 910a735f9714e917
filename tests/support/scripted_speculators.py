"""Speculators that propose by script: right, wrong, partly right, invalid, stale. Test tools, CPU only.

They know the plain continuation of every prompt beforehand (`expected`), and read the rows as any device method may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from engine.spec_decode.speculator import BaseSpeculator, DraftTokens, ProposalInputs

Pattern = Callable[[int, int, list[int]], list[int]]
"""(how many proposals this request had before, k, the tokens that plain decoding emits next) -> drafts."""

VOCAB_SIZE = 64
EOS = 2


def _wrong(token: int) -> int:
    return (token + 1) % VOCAB_SIZE


def _right_for(count: int) -> Pattern:
    return lambda turn, k, future: [
        token if index < count else _wrong(token) for index, token in enumerate(future[:k])
    ]


def _with(index: int, token: int) -> Pattern:
    def pattern(turn: int, k: int, future: list[int]) -> list[int]:
        drafts = list(future[:k])
        if index < len(drafts):
            drafts[index] = token
        return drafts

    return pattern


PATTERNS: Mapping[str, Pattern] = {
    "oracle": lambda turn, k, future: future[:k],
    "always_wrong": _right_for(0),
    "right_for_1": _right_for(1),
    "right_for_2": _right_for(2),
    "right_for_4": _right_for(4),
    "alternating": lambda turn, k, future: (_right_for(0) if turn % 2 else _right_for(k))(turn, k, future),
    "cycling": lambda turn, k, future: _right_for(turn % (k + 1))(turn, k, future),
    "eos_first": _with(0, EOS),
    "eos_second": _with(1, EOS),
    "outside_vocabulary": _with(1, VOCAB_SIZE),
    "minus_one": _with(0, -1),
    "fewer_than_k": lambda turn, k, future: future[: turn % (k + 1)],
    "nothing": lambda turn, k, future: [],
}


class ScriptedSpeculator(BaseSpeculator):
    """Proposes by a pattern. `expected`: prompt -> the tokens of plain decoding."""

    def __init__(self, pattern: Pattern, expected: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self._pattern = pattern
        self._expected = expected
        self._turns: dict[tuple[int, ...], int] = {}

    def propose(self, inputs: ProposalInputs) -> DraftTokens:
        rows = inputs.request_rows
        wanted = inputs.num_speculative_tokens
        token_ids = torch.full((inputs.num_reqs, max(inputs.wanted)), -1, dtype=torch.int64)
        counts = torch.zeros(inputs.num_reqs, dtype=torch.int64)
        for index, row in enumerate(inputs.row_list):
            if wanted[index] == 0:
                continue
            num_tokens = int(rows.num_tokens[row])
            history = rows.token_history[row, :num_tokens].tolist()
            prompt = tuple(history[: int(rows.num_prompt_tokens[row])])
            turn = self._turns.get(prompt, 0)
            self._turns[prompt] = turn + 1
            future = list(self._expected[prompt][num_tokens - len(prompt) :])
            drafts = self._pattern(turn, int(wanted[index]), future)
            token_ids[index, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
            counts[index] = len(drafts)
        return DraftTokens(token_ids, counts)


class StaleSpeculator(BaseSpeculator):
    """Repeats what another speculator proposed for the batch before, whatever rows that was for."""

    def __init__(self, inner: BaseSpeculator) -> None:
        self._inner = inner
        self._last: DraftTokens | None = None

    def propose(self, inputs: ProposalInputs) -> DraftTokens:
        current = self._inner.propose(inputs)
        last, self._last = self._last, current
        if last is None or last.token_ids.shape != current.token_ids.shape:
            return current
        return last
