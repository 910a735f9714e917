"""Who drafts for a request, and how much. The scheduler asks once for every step that samples, and reports back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.draft_method import DraftMethod
from engine.errors import InvalidRequestError
from engine.messages import AddRequest
from engine.request import NO_METHOD, Request
from engine.scheduler import not_drafted
from engine.scheduler.replays import Replay
from engine.step import RowResult, StepPlan

AUTO_METHOD = "auto"


class DraftChoice(NamedTuple):
    """k = 0: no drafts, for `reason`; a method that is named all the same keeps up with the request."""

    method: str
    k: int
    reason: str = ""


NO_DRAFTS = DraftChoice(NO_METHOD, 0, not_drafted.DISABLED)


class DraftPolicy(ABC):
    """Its choice is a wish: the scheduler clips k to what the request can still use."""

    def __init__(self, methods: Sequence[DraftMethod], default: str | None = None) -> None:
        """`default`: what stands for the method that a request leaves unset; None: the first method."""
        self.methods = {method.name: method for method in methods}
        self._first = methods[0].name if methods else NO_METHOD
        self._default = self._first if default is None else default

    @abstractmethod
    def validate(self, message: AddRequest) -> None:
        """Raise InvalidRequestError when the request asks for what is not loaded."""

    @abstractmethod
    def method_of(self, message: AddRequest) -> DraftMethod | None:
        """The method that keeps state for this request from its first token on; None: there is none."""

    @abstractmethod
    def choose(self, request: Request, num_decoding: int) -> DraftChoice:
        """Method and k for the drafts that follow the request's next step, in which `num_decoding` requests
        decode.
        """

    @abstractmethod
    def observe_result(self, request: Request, result: RowResult) -> None:
        """A decode of the request was collected."""

    @abstractmethod
    def replayed(self, request: Request) -> Mapping[str, int]:
        """Methods whose replays for this request are of use, and k."""

    @abstractmethod
    def observe_replay(self, request: Request, replay: Replay) -> None:
        """What such a method would have brought."""

    @abstractmethod
    def observe_step(self, plan: StepPlan, seconds: float, draft_seconds: float) -> None:
        """A step took so long; `draft_seconds` of it were spent on drafts."""

    @abstractmethod
    def forget(self, request: Request) -> None:
        """The request has ended."""


class FixedDraftPolicy(DraftPolicy):
    """What the request, or else the default, asks for; for "auto" the first loaded method, with its own k."""

    def validate(self, message: AddRequest) -> None:
        name = self._name(message)
        if name not in (NO_METHOD, AUTO_METHOD) and name not in self.methods:
            expected = ", ".join(repr(known) for known in (NO_METHOD, *self.methods, AUTO_METHOD))
            raise InvalidRequestError("speculation.method", f"got {name!r}, expected one of {expected}")
        k = message.speculation.num_speculative_tokens
        limit = self._max_drafts(name)
        if k is not None and not 0 <= k <= limit:
            raise InvalidRequestError(
                "speculation.num_speculative_tokens", f"got {k}, expected 0..{limit} for method {name!r}"
            )

    def method_of(self, message: AddRequest) -> DraftMethod | None:
        if message.speculation.num_speculative_tokens == 0:
            return None
        return self.methods.get(self._name(message))

    def choose(self, request: Request, num_decoding: int) -> DraftChoice:
        if request.draft_method is None:
            return NO_DRAFTS
        k = request.message.speculation.num_speculative_tokens
        return DraftChoice(request.draft_method.name, request.draft_method.max_drafts if k is None else k)

    def observe_result(self, request: Request, result: RowResult) -> None:
        """Nothing is learnt."""

    def replayed(self, request: Request) -> Mapping[str, int]:
        return {}

    def observe_replay(self, request: Request, replay: Replay) -> None:
        """Nothing is learnt."""

    def observe_step(self, plan: StepPlan, seconds: float, draft_seconds: float) -> None:
        """Nothing is learnt."""

    def forget(self, request: Request) -> None:
        """Nothing was kept."""

    def _asked(self, message: AddRequest) -> str:
        """The request's method, or the default; "auto" included."""
        method = message.speculation.method
        return self._default if method is None else method

    def _name(self, message: AddRequest) -> str:
        asked = self._asked(message)
        return self._first if asked == AUTO_METHOD else asked

    def _max_drafts(self, name: str) -> int:
        return self.methods[name].max_drafts if name in self.methods else 0
