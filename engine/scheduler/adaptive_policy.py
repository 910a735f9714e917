"""The draft policy that serves "auto": method and k by expected tokens per second, down to no drafts at all.

For a request, tokens come from its own acceptance, seconds from measured steps with as many decoding requests, as if
all of them chose alike. A choice is kept until another is better by a margin. What is not in use is tried for single
steps, ever more rarely while it brings nothing, so that a method can come back. Nothing here reads a clock or draws
random numbers: the same history gives the same choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.draft_method import DraftMethod
from engine.messages import AddRequest
from engine.request import NO_METHOD, Request
from engine.scheduler import not_drafted
from engine.scheduler.acceptance import MethodAcceptance, RequestAcceptance, expected_tokens
from engine.scheduler.draft_policy import AUTO_METHOD, NO_DRAFTS, DraftChoice, FixedDraftPolicy
from engine.scheduler.step_costs import StepCosts
from engine.step import RowResult, StepPlan

MARGIN = 1.01  # by how much a choice must be better to replace the current one
METHOD_MARGIN = 1.03  # the same for drafts of another method
REVIEW_INTERVAL = 8  # choices of a request between two looks at the alternatives
PROBE_DRAFTS = 3  # k of a probe
NEARLY = 0.98  # of the choice's speed: an alternative that is worth frequent probes
MIN_PROBE_INTERVAL = 8  # choices between two probes of a method that does well
MAX_PROBE_INTERVAL = 256
PLAIN = NO_METHOD  # the arm without drafts


@dataclass(slots=True)
class _Arm:
    """A method, or no drafts: when it is tried although it is not chosen."""

    interval: int = MIN_PROBE_INTERVAL
    last_used: int = 0  # by the count of choices

    def is_due(self, now: int) -> bool:
        return now - self.last_used >= self.interval

    def learn(self, *, is_worth_it: bool) -> None:
        self.interval = MIN_PROBE_INTERVAL if is_worth_it else min(2 * self.interval, MAX_PROBE_INTERVAL)


@dataclass(slots=True)
class _RequestState:
    choice: DraftChoice | None = None
    num_choices: int = 0
    num_decoding: int = 1  # in the step of the last review
    acceptance: dict[str, RequestAcceptance] = field(default_factory=dict)  # by method


class AdaptiveDraftPolicy(FixedDraftPolicy):
    """Requests that name a method, or none, get what they ask for; it learns from them too."""

    def __init__(self, methods: Sequence[DraftMethod]) -> None:
        super().__init__(methods)
        # Methods without KV of their own come first: of equals they are cheaper.
        self._candidates = sorted(methods, key=lambda method: method.kv_group is not None)
        self._acceptance = {method.name: MethodAcceptance() for method in methods}
        self._arms = {name: _Arm() for name in (PLAIN, *self.methods)}
        self._costs = StepCosts()
        self._states: dict[Request, _RequestState] = {}
        self._num_choices = 0

    def method_of(self, message: AddRequest) -> DraftMethod | None:
        """For "auto" the one with KV of its own, if there is one: it has to see every token."""
        if message.speculation.method != AUTO_METHOD or message.speculation.num_speculative_tokens == 0:
            return super().method_of(message)
        return self._candidates[-1] if self._candidates else None

    def choose(self, request: Request, num_decoding: int) -> DraftChoice:
        if request.draft_method is None:
            return NO_DRAFTS
        if request.message.speculation.method != AUTO_METHOD:
            return super().choose(request, num_decoding)
        self._num_choices += 1
        state = self._states.setdefault(request, _RequestState())
        if state.choice is None or state.num_choices % REVIEW_INTERVAL == 0:
            state.num_decoding = max(num_decoding, 1)
            state.choice = self._review(request, state)
        state.num_choices += 1
        choice = self._probe(request, state.choice) or state.choice
        self._arms[_arm_of(choice)].last_used = self._num_choices
        return choice

    def observe_result(self, request: Request, result: RowResult) -> None:
        method = result.draft_method
        if method not in self._acceptance:
            return
        self._acceptance[method].observe(result.num_drafted, result.num_accepted)
        state = self._states.get(request)
        if state is None:
            return
        if method not in state.acceptance:
            state.acceptance[method] = RequestAcceptance(self._acceptance[method])
        state.acceptance[method].observe(result.num_drafted, result.num_accepted)
        if state.choice is not None and method != _arm_of(state.choice):
            self._arms[method].learn(is_worth_it=self._is_worth_a_look(request, state, result))

    def observe_step(self, plan: StepPlan, seconds: float, draft_seconds: float) -> None:
        """Steps with prefills are left out, as is the drafting of steps in which several methods draft."""
        entries = plan.scheduled
        if any(entry.is_prefill for entry in entries):
            return
        rows_per_request = plan.num_scheduled_tokens / len(entries)
        self._costs.observe_verify(len(entries), rows_per_request, seconds - draft_seconds)
        methods = {entry.method for entry in entries} - {NO_METHOD}
        if len(methods) == 1:
            k = max(entry.num_next_drafts for entry in entries)
            self._costs.observe_draft(methods.pop(), len(entries), k, draft_seconds)

    def forget(self, request: Request) -> None:
        self._states.pop(request, None)

    def _max_drafts(self, name: str) -> int:
        if name == AUTO_METHOD:
            return max((method.max_drafts for method in self.methods.values()), default=0)
        return super()._max_drafts(name)

    def _name(self, message: AddRequest) -> str:
        return AUTO_METHOD if message.speculation.method == AUTO_METHOD else super()._name(message)

    # ---- "auto" --------------------------------------------------------------------------------------------

    def _review(self, request: Request, state: _RequestState) -> DraftChoice:
        """The fastest choice; the current one while none is faster by the margin."""
        usable = self._usable(request)
        for method, acceptance in state.acceptance.items():
            if state.choice is None or method != _arm_of(state.choice):
                acceptance.fade()
        current = state.choice or DraftChoice(usable[0].name, _cap(request, usable[0]))
        current_speed = self._speed(state, current)
        if current_speed == 0.0:  # nothing is measured yet
            return current
        best, best_gain = current, 1.0
        for choice in [_plain(request), *self._drafting(request, usable)]:
            is_near = choice.k == 0 or choice.method == current.method
            gain = self._speed(state, choice) / current_speed / (MARGIN if is_near else METHOD_MARGIN)
            if gain > best_gain:
                best, best_gain = choice, gain
        return best

    def _drafting(self, request: Request, methods: Sequence[DraftMethod]) -> list[DraftChoice]:
        return [
            DraftChoice(method.name, k) for method in methods for k in range(1, _cap(request, method) + 1)
        ]

    def _speed(self, state: _RequestState, choice: DraftChoice) -> float:
        """Expected tokens per second and request; 0 while the costs are not known."""
        found, tokens = 0.0, 1.0
        if choice.k > 0:
            acceptance = state.acceptance.get(choice.method, self._acceptance[choice.method])
            found = acceptance.found
            tokens += found * (expected_tokens(acceptance.rate, choice.k) - 1.0)
        verify = self._costs.verify(state.num_decoding, 1.0 + found * choice.k)
        if verify is None:
            return 0.0
        return tokens / (verify + self._costs.draft(choice.method, state.num_decoding, choice.k))

    def _is_worth_a_look(self, request: Request, state: _RequestState, result: RowResult) -> bool:
        """After a probe: did it go well, or is the method nearly as good as the choice?"""
        if result.num_drafted > 0 and 2 * result.num_accepted >= result.num_drafted:
            return True
        assert state.choice is not None
        speed = self._speed(state, state.choice)
        drafting = self._drafting(request, [self.methods[result.draft_method]])
        return max(self._speed(state, choice) for choice in drafting) >= NEARLY * speed

    def _probe(self, request: Request, choice: DraftChoice) -> DraftChoice | None:
        """Something else for one step, when its turn has come."""
        for name, arm in self._arms.items():
            if name == _arm_of(choice) or not arm.is_due(self._num_choices):
                continue
            if name == PLAIN:
                arm.learn(is_worth_it=False)  # it only measures the plain step
                return _plain(request)
            method = self.methods[name]
            if method in self._usable(request):
                return DraftChoice(name, min(PROBE_DRAFTS, _cap(request, method)))
        return None

    def _usable(self, request: Request) -> list[DraftMethod]:
        """Methods without KV of their own, and the one that has seen all of the request."""
        return [
            method for method in self._candidates if method.kv_group is None or method is request.draft_method
        ]


def _arm_of(choice: DraftChoice) -> str:
    return choice.method if choice.k > 0 else PLAIN


def _plain(request: Request) -> DraftChoice:
    """No drafts; a method with KV of its own keeps up, so that it can come back."""
    own = request.draft_method
    keeps_up = own is not None and own.kv_group is not None
    return DraftChoice(own.name if own is not None and keeps_up else NO_METHOD, 0, not_drafted.K_ZERO)


def _cap(request: Request, method: DraftMethod) -> int:
    k = request.message.speculation.num_speculative_tokens
    return method.max_drafts if k is None else min(k, method.max_drafts)
