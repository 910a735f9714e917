"""Suffix decoding: drafts are what followed the same words before, in this request or in past outputs.

Oliaro et al. 2024 (arXiv:2411.04975); the matching is in engine/spec_decode/suffix_index.py. A host method: it learns
from every request that ends, whoever drafted for it.
"""

from __future__ import annotations

from collections import deque

from engine.spec_decode.host import HostSpeculator, RequestView
from engine.spec_decode.suffix_index import NOTHING, SuffixIndex

MAX_OWN_TOKENS = 4096  # newest tokens of a prompt that are searched


class SuffixSpeculator(HostSpeculator):
    """`min_match`, `max_match`: shortest match, and longest that is told apart, in tokens. `max_past_tokens`: bound
    of what is kept of past outputs, over all tenants; the oldest go first.
    """

    def __init__(self, min_match: int, max_match: int, min_probability: float, max_past_tokens: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._min_probability = min_probability
        self._max_past_tokens = max_past_tokens
        self._own: dict[str, _OwnTokens] = {}  # by request id
        self._past: dict[str, SuffixIndex] = {}  # by cache salt: tenants never see each other
        self._past_order: deque[tuple[str, int]] = deque()  # (cache salt, tokens) of each past output
        self._num_past_tokens = 0

    def propose(self, view: RequestView) -> list[int]:
        own = self._own.get(view.request_id)
        if own is None:
            own = self._own[view.request_id] = _OwnTokens(self._new_index(), view)
        own.update(view)
        tail = view.token_ids[-self._max_match :]
        best = own.index.continue_tail(tail, view.max_drafts, self._min_probability)
        past = self._past.get(view.cache_salt)
        learnt = past.continue_tail(tail, view.max_drafts, self._min_probability) if past else NOTHING
        return max(best, learnt, key=lambda continuation: continuation.score).token_ids

    def finish(self, view: RequestView) -> None:
        self._own.pop(view.request_id, None)
        output = view.token_ids[view.num_prompt_tokens :][-self._max_past_tokens :]
        if len(output) <= self._min_match:  # nothing follows an anchor
            return
        self._past.setdefault(view.cache_salt, self._new_index()).add(output)
        self._past_order.append((view.cache_salt, len(output)))
        self._num_past_tokens += len(output)
        while self._num_past_tokens > self._max_past_tokens:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        salt, num_tokens = self._past_order.popleft()
        self._num_past_tokens -= num_tokens
        self._past[salt].remove_oldest()
        if self._past[salt].num_texts == 0:
            del self._past[salt]

    def _new_index(self) -> SuffixIndex:
        return SuffixIndex(self._min_match, self._max_match)


class _OwnTokens:
    """The index of one live request's prompt and output."""

    def __init__(self, index: SuffixIndex, view: RequestView) -> None:
        self.index = index
        self._num_seen = max(len(view.token_ids) - MAX_OWN_TOKENS, 0)
        index.add(())

    def update(self, view: RequestView) -> None:
        self.index.extend(view.token_ids[self._num_seen :])
        self._num_seen = len(view.token_ids)
