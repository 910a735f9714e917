"""A draft policy that an administrator changes while requests run: methods on and off, their k, the default.

It surrounds another policy, which knows nothing of this. What is adjusted here lowers what that one wishes; only
who may draft at all is its concern too, so it is made anew for another set of methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from engine.control import ConfigureSpeculation, SpeculationState, SpeculatorState
from engine.draft_method import DraftMethod
from engine.errors import InvalidRequestError
from engine.messages import AddRequest
from engine.request import NO_METHOD, Request
from engine.scheduler import not_drafted
from engine.scheduler.draft_policy import AUTO_METHOD, DraftChoice, DraftPolicy
from engine.scheduler.replays import Replay
from engine.step import RowResult, StepPlan

MakePolicy = Callable[[Sequence[DraftMethod]], DraftPolicy]


class AdjustableDraftPolicy(DraftPolicy):
    """Requests that name a disabled method run, without drafts: their text is the same."""

    def __init__(self, methods: Sequence[DraftMethod], default: str, make: MakePolicy) -> None:
        super().__init__(methods, default)
        self._make = make
        self._all = self._current = make(methods)
        self._disabled: frozenset[str] = frozenset()
        self._caps = {method.name: method.max_drafts for method in methods}
        self._default_method = default

    # ---- adjusting -----------------------------------------------------------------------------------------

    def state(self) -> SpeculationState:
        return SpeculationState(
            speculators=tuple(
                SpeculatorState(
                    method=name,
                    is_enabled=name not in self._disabled,
                    k=self._caps[name],
                    max_k=method.max_drafts,
                )
                for name, method in self.methods.items()
            ),
            default_method=self._default_method,
        )

    def configure(self, action: ConfigureSpeculation) -> None:
        """Raises InvalidRequestError, and changes nothing then."""
        disabled, caps = set(self._disabled), dict(self._caps)
        for index, change in enumerate(action.changes):
            self._check_method(f"speculators[{index}].method", change.method)
            if change.is_enabled is not None:
                (disabled.discard if change.is_enabled else disabled.add)(change.method)
            if change.k is not None:
                limit = self.methods[change.method].max_drafts
                if not 1 <= change.k <= limit:
                    field = f"speculators[{index}].num_speculative_tokens"
                    raise InvalidRequestError(field, f"got {change.k}, expected 1..{limit}")
                caps[change.method] = change.k
        if action.default_method is not None:
            self._check_method("default_method", action.default_method, AUTO_METHOD, NO_METHOD)
            self._default_method = action.default_method
        self._caps = caps
        if disabled != self._disabled:
            self._disabled = frozenset(disabled)
            enabled = [method for name, method in self.methods.items() if name not in disabled]
            self._current = self._make(enabled) if disabled else self._all

    def resolve(self, message: AddRequest) -> AddRequest:
        """The request with the default of this moment as its method, if it names none."""
        if message.speculation.method is not None:
            return message
        speculation = msgspec.structs.replace(message.speculation, method=self._default_method)
        return msgspec.structs.replace(message, speculation=speculation)

    def _check_method(self, field: str, name: str, *others: str) -> None:
        if name not in (*self.methods, *others):
            expected = ", ".join(map(repr, (*self.methods, *others))) or "none: no draft method is loaded"
            raise InvalidRequestError(field, f"got {name!r}, expected one of {expected}")

    # ---- DraftPolicy ---------------------------------------------------------------------------------------

    def validate(self, message: AddRequest) -> None:
        self._all.validate(message)

    def method_of(self, message: AddRequest) -> DraftMethod | None:
        if message.speculation.method in self._disabled:
            return None
        return self._current.method_of(message)

    def choose(self, request: Request, num_decoding: int) -> DraftChoice:
        own = request.draft_method
        if own is not None and own.name in self._disabled:
            # One that has to see every step does, so that it can come back.
            return DraftChoice(own.name if own.keeps_up else NO_METHOD, 0, not_drafted.DISABLED)
        choice = self._current.choose(request, num_decoding)
        cap = self._caps.get(choice.method, choice.k)
        return choice._replace(k=cap) if cap < choice.k else choice

    def observe_result(self, request: Request, result: RowResult) -> None:
        self._current.observe_result(request, result)

    def replayed(self, request: Request) -> Mapping[str, int]:
        return self._current.replayed(request)

    def observe_replay(self, request: Request, replay: Replay) -> None:
        self._current.observe_replay(request, replay)

    def observe_step(self, plan: StepPlan, seconds: float, draft_seconds: float) -> None:
        self._current.observe_step(plan, seconds, draft_seconds)

    def forget(self, request: Request) -> None:
        for policy in {id(policy): policy for policy in (self._all, self._current)}.values():
            policy.forget(request)
