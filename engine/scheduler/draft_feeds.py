"""How far a drafter that catches up is behind its request, and what it is fed.

Such a drafter is run only in steps that it drafts for. What it missed in between it is fed when it is chosen again,
from its watermark on, together with the step's tokens: at once if that is not more than a chunk, else chunk by chunk,
without drafts until the rest fits. It knows tokens and slots, not who chose the drafter.

With steps in flight the plan counts on them (`Request.next_draft_start`). When one fails, feeds that were planned
behind it are void: they do not reach back to the watermark, so they do not move it, and the next one starts there.
"""

from __future__ import annotations

from engine.request import NO_METHOD, Request
from engine.scheduler import not_drafted
from engine.scheduler.draft_policy import DraftChoice
from engine.scheduler.kv_manager import KVManager
from engine.step import DraftFeed, RowResult, ScheduledRequest

MIN_FEED = 4  # tokens: fewer would hardly close a gap, or never


class DraftFeeder:
    """`max_chunk`: missed tokens of one request in a step; `budget`: of all of them."""

    def __init__(self, kv: KVManager, max_chunk: int, budget: int) -> None:
        self._kv = kv
        # A step that only catches up adds a token to what is missed.
        self._max_chunk = max(max_chunk, MIN_FEED)
        self._budget = max(budget, MIN_FEED)
        self._num_left = self._budget

    def begin_step(self) -> None:
        self._num_left = self._budget

    def plan(
        self, request: Request, num_tokens: int, drafts: DraftChoice
    ) -> tuple[DraftChoice, DraftFeed | None]:
        """Right before a step of `num_tokens` is added to the plan: what may be drafted after it, and what is fed. It
        takes the blocks for that.
        """
        own = request.draft_method
        if own is None or not own.catches_up:
            return drafts, None
        first = request.next_draft_start
        if drafts.method != own.name or drafts.k == 0:
            if first is None:
                request.next_draft_start = request.min_num_computed_tokens
            return drafts if drafts.method != own.name else drafts._replace(method=NO_METHOD), None
        end = min(request.max_num_computed_tokens + num_tokens, request.token_limit)
        num_missed = 0 if first is None else request.max_num_computed_tokens - first
        num_slots = self._kv.max_draft_slots(request)
        if num_missed > min(self._max_chunk, self._num_left) or end > num_slots:
            return self._plan_chunk(request, own.name, num_slots)
        self._num_left -= num_missed
        request.next_draft_start = None
        k = drafts.k if num_slots >= request.token_limit else min(drafts.k, num_slots - end)
        self._kv.grow_drafter(request, min(end + k, request.token_limit))
        return (
            drafts._replace(k=k, reason=drafts.reason if k else not_drafted.LIMIT),
            None if first is None else DraftFeed(first, end - first),
        )

    def _plan_chunk(
        self, request: Request, method: str, num_slots: int
    ) -> tuple[DraftChoice, DraftFeed | None]:
        """A part of what was missed, as far as it is known for certain, and no drafts."""
        known = request.min_num_computed_tokens
        first = known if request.next_draft_start is None else request.next_draft_start
        num_tokens = min(known - first, self._max_chunk, self._num_left, num_slots - first)
        request.next_draft_start = first + max(num_tokens, 0)
        if num_tokens <= 0:
            reason = not_drafted.LIMIT if num_slots <= known else not_drafted.CATCHING_UP
            return DraftChoice(NO_METHOD, 0, reason), None
        self._num_left -= num_tokens
        self._kv.grow_drafter(request, first + num_tokens)
        return DraftChoice(method, 0, not_drafted.CATCHING_UP), DraftFeed(first, num_tokens)


def note_feed(
    request: Request, entry: ScheduledRequest, result: RowResult, start: int, num_confirmed: int
) -> None:
    """A step from position `start` on was collected; `num_confirmed`: tokens whose KV is valid since then."""
    own = request.draft_method
    if own is None or not own.catches_up or entry.method != own.name:
        return
    first, end = start, num_confirmed
    if entry.draft_feed is not None:
        first = entry.draft_feed.start
        end = min(first + entry.draft_feed.num_tokens, num_confirmed)
    if first > request.draft_watermark:  # a step before it failed, and the next feed was set back then
        return
    if result.drafter_error or result.nan_draft:
        request.next_draft_start = request.draft_watermark
        return
    request.draft_watermark = max(request.draft_watermark, end)
    if request.next_draft_start is not None:
        request.next_draft_start = max(request.next_draft_start, request.draft_watermark)
