"""Suffix decoding: drafts are what followed the same words before, in this request or in past outputs.

Oliaro et al. 2024 (arXiv:2411.04975); the matching is in engine/spec_decode/suffix_index.py. A host method: it learns
from every request that ends, whoever drafted for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.spec_decode.host import HostSpeculator, RequestView
from engine.spec_decode.replay import LookupMethod, LookupReplay
from engine.spec_decode.suffix_index import NOTHING, SuffixIndex

MAX_OWN_TOKENS = 4096  # newest tokens of a prompt that are searched


class SuffixSpeculator(HostSpeculator, LookupMethod):
    """`min_match`, `max_match`: shortest match, and longest that is told apart, in tokens. `max_past_tokens`: bound
    of what is kept of past outputs, over all tenants; the oldest go first.
    """

    def __init__(self, min_match: int, max_match: int, min_probability: float, max_past_tokens: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._min_probability = min_probability
        self._max_past_tokens = max_past_tokens
        self._own: dict[str, _LiveText] = {}  # by request id
        self._past: dict[str, SuffixIndex] = {}  # by cache salt: tenants never see each other
        self._past_order: deque[tuple[str, int]] = deque()  # (cache salt, tokens) of each past output
        self._num_past_tokens = 0

    def propose(self, view: RequestView) -> list[int]:
        own = self._own.get(view.request_id)
        if own is None:
            num_skipped = max(len(view.token_ids) - MAX_OWN_TOKENS, 0)
            own = self._own[view.request_id] = _LiveText(self.replay(view.cache_salt), num_skipped)
        own.text.read(view.token_ids[own.num_seen :])
        own.num_seen = len(view.token_ids)
        return own.text.propose(view.max_drafts)

    def replay(self, cache_salt: str) -> SuffixReplay:
        return SuffixReplay(
            self._new_index(), lambda: self._past.get(cache_salt), self._max_match, self._min_probability
        )

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


class SuffixReplay(LookupReplay):
    """The text of one request, and past outputs as they are by now."""

    max_prompt_tokens = MAX_OWN_TOKENS

    def __init__(
        self, own: SuffixIndex, past: Callable[[], SuffixIndex | None], max_match: int, min_probability: float
    ) -> None:
        self._own = own
        self._past = past
        self._min_probability = min_probability
        self._tail: deque[int] = deque(maxlen=max_match)
        own.add(())

    def read(self, token_ids: Sequence[int]) -> None:
        self._own.extend(token_ids)
        self._tail.extend(token_ids)

    def propose(self, max_drafts: int) -> list[int]:
        tail, past = list(self._tail), self._past()
        best = self._own.continue_tail(tail, max_drafts, self._min_probability)
        learnt = past.continue_tail(tail, max_drafts, self._min_probability) if past else NOTHING
        return max(best, learnt, key=lambda continuation: continuation.score).token_ids


@dataclass(slots=True)
class _LiveText:
    text: SuffixReplay
    num_seen: int  # tokens of the request that were read, or skipped
