"""Drafts that are made on the host for requests of which no step is in flight.

It is where faults of a host method end: a method that raises, or proposes what are no tokens, leaves its request
without drafts for one step. It knows which requests wait for drafts, not when they are scheduled.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from engine.request import Request
from engine.scheduler.grammars import Grammars
from engine.spec_decode.host import HostSpeculator, RequestView
from engine.step import StepPlan

logger = logging.getLogger(__name__)


class HostDrafts:
    """Owns the host methods, by name."""

    def __init__(self, speculators: Mapping[str, HostSpeculator], vocab_size: int) -> None:
        self._speculators = speculators
        self._vocab_size = vocab_size
        self.num_failures: Counter[tuple[str, str]] = Counter()  # (method, class of the exception)

    @property
    def has_methods(self) -> bool:
        return bool(self._speculators)

    def makes(self, method: str) -> bool:
        """Are this method's drafts made here?"""
        return method in self._speculators

    def num_waited_for(self, plan: StepPlan) -> int:
        """Requests of the step that are in no other one before it is collected."""
        if not self._speculators:
            return 0
        return sum(self.makes(entry.method) for entry in plan.scheduled if entry.num_next_drafts > 0)

    def make(self, requests: Iterable[Request], grammars: Grammars) -> None:
        """Fill `host_drafts` of those that decode and wait for them. What a grammar forces is drafted with them."""
        if not self._speculators:
            return
        for request in requests:
            if (
                self.makes(request.next_method)
                and not request.is_in_flight
                and request.num_prefill_tokens_left <= 0
            ):
                self._draft(request, grammars)

    def finish(self, request: Request) -> None:
        """The request has ended: every method may learn from it, and drops what it kept for it."""
        for method, speculator in self._speculators.items():
            try:
                speculator.finish(_view(request, 0))
            except Exception as error:  # a drafter's fault must not cost anything but drafts
                self._log(method, error)

    def _draft(self, request: Request, grammars: Grammars) -> None:
        """Called again when the step could not be scheduled: the same drafts, as nothing has changed."""
        k = min(request.num_next_drafts, request.num_usable_drafts)
        request.host_drafts = []
        request.has_drafter_failed = False
        if k <= 0:
            return
        try:
            proposed = self._speculators[request.next_method].propose(_view(request, k))
            request.host_drafts = grammars.complete_drafts(request, self._checked(proposed[:k]), k)
        except Exception as error:  # a drafter's fault must not cost the target's tokens
            request.has_drafter_failed = True
            self._log(request.next_method, error)

    def _checked(self, token_ids: list[int]) -> list[int]:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(f"got the draft {token_id}, expected 0 <= id < {self._vocab_size}")
        return token_ids

    def _log(self, method: str, error: Exception) -> None:
        kind = (method, type(error).__name__)
        self.num_failures[kind] += 1
        if self.num_failures[kind] == 1:
            logger.error(
                "draft method %s failed; its requests go on without drafts in such steps. "
                "Logged once per kind of exception",
                method,
                exc_info=error,
            )


def _view(request: Request, max_drafts: int) -> RequestView:
    return RequestView(
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        cache_salt=request.message.cache_salt,
        max_drafts=max_drafts,
    )
