"""A host draft method for scheduler tests: it knows the target, and is right for a scripted number of tokens."""

from __future__ import annotations

from collections.abc import Callable

from engine.spec_decode.host import HostSpeculator, RequestView
from tests.support.fake_device import VOCAB_SIZE, continuation


class ScriptedHost(HostSpeculator):
    """`num_right(k)`: how many of k drafts are right. Keeps what it was asked and told."""

    def __init__(self, num_right: Callable[[int], int] = lambda k: k) -> None:
        self._num_right = num_right
        self.num_proposals = 0
        self.live: set[str] = set()
        self.finished: list[tuple[str, list[int]]] = []  # request id, its output

    def propose(self, view: RequestView) -> list[int]:
        self.num_proposals += 1
        self.live.add(view.request_id)
        drafts = continuation(view.token_ids, view.max_drafts)
        num_right = self._num_right(view.max_drafts)
        if num_right < len(drafts):
            drafts[num_right] = (drafts[num_right] + 1) % VOCAB_SIZE
        return drafts

    def finish(self, view: RequestView) -> None:
        self.live.discard(view.request_id)
        self.finished.append((view.request_id, list(view.token_ids[view.num_prompt_tokens :])))
