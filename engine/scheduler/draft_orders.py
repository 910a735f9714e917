"""What a step asks of drafters for one request: what the policy wishes, as far as there is room for it.

It knows limits, contexts and slots, not why a method was chosen, nor how it drafts.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.draft_method import DraftMethod
from engine.request import NO_METHOD, Request
from engine.scheduler import not_drafted
from engine.scheduler.draft_feeds import DraftFeeder
from engine.scheduler.draft_policy import NO_DRAFTS, DraftChoice, DraftPolicy
from engine.scheduler.kv_manager import KVManager
from engine.step import DraftFeed


class DraftOrder(NamedTuple):
    """Who drafts for the next step and how much, what that one is fed first, and who only keeps up."""

    choice: DraftChoice
    feed: DraftFeed | None = None
    keeps_up: str = NO_METHOD


NOTHING = DraftOrder(NO_DRAFTS)


class DraftOrders:
    """`max_drafts`: of any method; `max_chunk`, `budget`: tokens of one request and of all in a step."""

    def __init__(
        self, kv: KVManager, policy: DraftPolicy, *, max_drafts: int, max_chunk: int, budget: int
    ) -> None:
        self._kv = kv
        self._policy = policy
        self._max_drafts = max_drafts
        self._feeder = DraftFeeder(kv, max_chunk, budget)

    def begin_step(self) -> None:
        self._feeder.begin_step()

    def place(self, request: Request, num_tokens: int, num_decoding: int) -> DraftOrder:
        """Right before the request's next step, of `num_tokens`, is added to a plan in which `num_decoding` requests
        decode. It takes the blocks that a drafter needs.
        """
        if request.draft_method is None:
            return NOTHING
        choice, feed = self._feeder.plan(request, num_tokens, self._choose(request, num_tokens, num_decoding))
        return DraftOrder(choice, feed, _who_keeps_up(request, choice.method, num_tokens))

    def _choose(self, request: Request, num_tokens: int, num_decoding: int) -> DraftChoice:
        choice = self._policy.choose(request, num_decoding)
        method = self._policy.methods.get(choice.method)
        if method is not None:
            num_left = _drafter_room(method, request, num_tokens)
            if num_left <= 0:
                return DraftChoice(NO_METHOD, 0, not_drafted.DRAFTER_LIMIT)
            if num_left < choice.k:
                choice = choice._replace(k=num_left)
        if choice.k == 0:
            return choice
        num_usable = min(request.num_usable_drafts - 1, self._max_drafts)
        if request.num_lookahead_slots > 0:
            # What the drafter writes behind the step's tokens needs slots, up to the request's limit.
            num_slots = self._kv.num_slots(request)
            if num_slots < request.token_limit:
                num_usable = min(num_usable, num_slots - request.max_num_computed_tokens - num_tokens)
        if num_usable <= 0:
            return DraftChoice(choice.method, 0, not_drafted.LIMIT)
        return choice._replace(k=num_usable) if num_usable < choice.k else choice


def _drafter_room(method: DraftMethod, request: Request, num_tokens: int) -> int:
    """Drafts for which the drafter's own context has room behind a step of `num_tokens`; 0 or less: it has none for
    the step itself, or nothing behind it.
    """
    if method.max_context is None:
        return method.max_drafts
    return method.max_context - request.max_num_computed_tokens - num_tokens


def _who_keeps_up(request: Request, drafting: str, num_tokens: int) -> str:
    """The request's method, if it has to see the step of `num_tokens` although another drafts."""
    own = request.draft_method
    if own is None or not own.keeps_up or own.name == drafting:
        return NO_METHOD
    return own.name if _drafter_room(own, request, num_tokens) > 0 else NO_METHOD
