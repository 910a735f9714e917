"""How fast a request would decode with each method and k: acceptance and costs, as far as they are known, together.

Tokens come from the request's own acceptance, seconds from measured steps with as many decoding requests, as if all of
them chose alike. It knows what was, not who is to draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.draft_method import DraftMethod
from engine.request import NO_METHOD, Request
from engine.scheduler.acceptance import (
    MethodAcceptance,
    RequestAcceptance,
    expected_accepted,
    expected_drafted,
)
from engine.scheduler.step_costs import StepCosts
from engine.step import ScheduledRequest, StepPlan

MIN_RUN = 2  # drafts right in a row, from which on a lookup method is in a match
HORIZON = 64  # tokens over which a drafter that catches up has to pay for that
SEVERAL = "several"  # in the place of a method: a step in which more than one drafts


class DraftSource(NamedTuple):
    """Where drafts come from: a method, and for a lookup method, is it in a match?"""

    method: str
    is_in_match: bool = False


class DraftSpeeds:
    """Tokens per second and request."""

    def __init__(self, methods: Sequence[DraftMethod]) -> None:
        self._methods = {method.name: method for method in methods}
        self._costs = StepCosts()
        self.acceptance = {
            DraftSource(method.name, is_in_match): MethodAcceptance()
            for method in methods
            for is_in_match in {False, method.is_replayed}
        }

    def observe_step(self, plan: StepPlan, seconds: float, draft_seconds: float) -> None:
        """Steps with prefills are left out."""
        entries = plan.scheduled
        if not self._methods or plan.chunks:
            return
        used: dict[str, int] = {}  # k of each method that drafts or keeps up
        for entry in entries:
            if entry.method != NO_METHOD:
                used[entry.method] = max(entry.num_next_drafts, used.get(entry.method, 0))
        drafting = [method for method, k in used.items() if k > 0]
        label = NO_METHOD if not drafting else drafting[0] if len(drafting) == 1 else SEVERAL
        rows_per_request = plan.num_scheduled_tokens / len(entries)
        num_missed = sum(map(_num_missed, entries))
        if num_missed > 0:
            without = self._costs.verify(len(entries), label, rows_per_request)
            if without is not None:
                without += sum(self._costs.draft(method, len(entries), k) for method, k in used.items())
                drafter = next(entry.method for entry in entries if entry.draft_feed is not None)
                self._costs.observe_feed(drafter, num_missed, seconds - without, without)
            return
        self._costs.observe_verify(len(entries), label, rows_per_request, seconds - draft_seconds)
        self._costs.observe_drafts(used, len(entries), draft_seconds)

    def plain(self, num_decoding: int, keeps_up: str) -> float | None:
        """Without drafts, while the method `keeps_up` keeps up; None while the costs are not known."""
        seconds = self._costs.verify(num_decoding, NO_METHOD, 1.0)
        return None if seconds is None else 1.0 / (seconds + self._costs.draft(keeps_up, num_decoding, 0))

    def drafting(
        self,
        request: Request,
        source: DraftSource,
        own: RequestAcceptance | None,
        num_decoding: int,
        max_drafts: int,
    ) -> list[float]:
        """With 1, 2, ..., max_drafts drafts. `own`: the request's acceptance, if it has any."""
        method, acceptance = source.method, own or self.acceptance[source]
        found, drafted = acceptance.found, expected_drafted(acceptance, max_drafts)
        accepted = expected_accepted(acceptance, max_drafts)
        num_tokens_left = max(request.token_limit - request.min_num_tokens, 1)
        catch_up = self.catch_up_seconds(request, method) / min(num_tokens_left, HORIZON)
        speeds = []
        for k in range(1, max_drafts + 1):
            num_tokens = 1.0 + found * accepted[k]
            seconds = self._verify_seconds(num_decoding, method, found, drafted[k])
            seconds += self._costs.draft(method, num_decoding, k)
            speeds.append(num_tokens / (seconds + num_tokens * catch_up))
        return speeds

    def catch_up_seconds(self, request: Request, method: str) -> float:
        """For what the method has missed of the request; 0 for one that misses nothing."""
        first = request.next_draft_start
        if not self._methods[method].catches_up or first is None:
            return 0.0
        return self._costs.feed(method, request.max_num_computed_tokens - first)

    def _verify_seconds(self, num_decoding: int, method: str, found: float, num_drafts: float) -> float:
        """One request has drafts in a step, or none; of many the mean stands."""
        if num_decoding > 1:
            return self._costs.verify(num_decoding, method, 1.0 + found * num_drafts) or 0.0
        with_drafts = self._costs.verify(num_decoding, method, 1.0 + num_drafts) or 0.0
        without = self._costs.verify(num_decoding, method, 1.0) or 0.0
        return found * with_drafts + (1.0 - found) * without


def _num_missed(entry: ScheduledRequest) -> int:
    """Tokens that a drafter is fed beyond those of the step; the step's are fed too where drafts are asked for."""
    if entry.draft_feed is None:
        return 0
    return max(entry.draft_feed.num_tokens - (entry.num_tokens if entry.num_next_drafts > 0 else 0), 0)
