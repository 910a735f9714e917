"""Draft methods that run on the host, between the collection of a step and the launch of the next. Torch-free.

They see confirmed tokens only and know nothing of rows, steps or blocks. The price is that a request drafted for has
one step in flight at most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """What a host method may know of a request."""

    request_id: str
    token_ids: Sequence[
        int
    ]  # confirmed, prompt first; grows from call to call and must not be changed or kept
    num_prompt_tokens: int
    cache_salt: str  # nothing of a request may show in drafts for one of another salt
    max_drafts: int  # k wanted; 0 once the request has ended


class HostSpeculator(ABC):
    """A draft method that keeps its state on the host."""

    @abstractmethod
    def propose(self, view: RequestView) -> list[int]:
        """At most `view.max_drafts` tokens that may follow; fewer, or none, when they are not likely enough."""

    @abstractmethod
    def finish(self, view: RequestView) -> None:
        """The request has ended, or was never drafted for: drop its state, learn from it."""
