"""The draft policy that serves "auto": method and k by expected tokens per second, down to no drafts at all.

For a request, tokens come from its own acceptance, seconds from measured steps with as many decoding requests, as if
all of them chose alike. A choice is kept until another is better by a margin. What is not in use is tried now and then
(probes.py). Nothing here reads a clock or draws random numbers: the same history gives the same choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.draft_method import DraftMethod
from engine.messages import AddRequest
from engine.request import NO_METHOD, Request
from engine.scheduler import not_drafted
from engine.scheduler.acceptance import MethodAcceptance, RequestAcceptance, expected_accepted
from engine.scheduler.draft_policy import AUTO_METHOD, NO_DRAFTS, DraftChoice, FixedDraftPolicy
from engine.scheduler.probes import MethodProbe, PlainProbe
from engine.scheduler.step_costs import StepCosts, bucket
from engine.step import RowResult, StepPlan

MARGIN = 1.01  # by how much a choice must be better to replace the current one
METHOD_MARGIN = 1.03  # the same for drafts of another method
EARLY_REVIEWS = (2, 4)  # choices of a request before it looks at the alternatives for the first times
REVIEW_INTERVAL = 8  # choices between two looks from then on
SEVERAL = "several"  # in the place of a method: a step in which more than one drafts
MIN_PROBE_DRAFTS = 2  # of a probe, even if one would be best


@dataclass(slots=True)
class _RequestState:
    choice: DraftChoice | None = None
    num_choices: int = 0
    num_decoding: int = 1  # in the step of the last review
    is_review_due: bool = True
    acceptance: dict[str, RequestAcceptance] = field(default_factory=dict)  # by method
    probes: dict[str, MethodProbe] = field(default_factory=dict)  # by method
    probe_drafts: dict[str, int] = field(default_factory=dict)  # by method: k of a probe


class AdaptiveDraftPolicy(FixedDraftPolicy):
    """Requests that name a method, or none, get what they ask for; it learns from them too."""

    def __init__(self, methods: Sequence[DraftMethod], default: str | None = None) -> None:
        super().__init__(methods, default)
        # Methods without KV of their own come first: of equals they are cheaper.
        self._candidates = sorted(methods, key=lambda method: method.has_own_kv)
        self._acceptance = {method.name: MethodAcceptance() for method in methods}
        self._costs = StepCosts()
        self._plain_probes: dict[int, PlainProbe] = {}  # by bucket of decoding requests
        self._states: dict[Request, _RequestState] = {}
        self._num_steps = 0

    def method_of(self, message: AddRequest) -> DraftMethod | None:
        """For "auto" the one with KV of its own, if there is one: it has to see every token."""
        if self._name(message) != AUTO_METHOD or message.speculation.num_speculative_tokens == 0:
            return super().method_of(message)
        return self._candidates[-1] if self._candidates else None

    def choose(self, request: Request, num_decoding: int) -> DraftChoice:
        if request.draft_method is None:
            return NO_DRAFTS
        if self._name(request.message) != AUTO_METHOD:
            return super().choose(request, num_decoding)
        state = self._states.setdefault(request, _RequestState())
        state.is_review_due |= state.num_choices in EARLY_REVIEWS or state.num_choices % REVIEW_INTERVAL == 0
        state.num_choices += 1
        if state.choice is None or state.is_review_due:
            state.is_review_due = False
            state.num_decoding = max(num_decoding, 1)
            self._review(request, state)
        assert state.choice is not None
        return self._probe(request, state, state.choice) or state.choice

    def observe_result(self, request: Request, result: RowResult) -> None:
        method = result.draft_method
        if method not in self._acceptance:
            return
        state = self._states.get(request)
        if state is not None:
            acceptance = state.acceptance.setdefault(method, RequestAcceptance(self._acceptance[method]))
            if method in state.probes and state.choice is not None and method != _drafting(state.choice):
                is_surprise = acceptance.is_surprise(result.num_drafted, result.num_accepted)
                state.probes[method].learn(is_surprise=is_surprise)
                state.is_review_due |= is_surprise
            acceptance.observe(result.num_drafted, result.num_accepted)
        self._acceptance[method].observe(result.num_drafted, result.num_accepted)

    def observe_step(self, plan: StepPlan, seconds: float, draft_seconds: float) -> None:
        """Steps with prefills, the target's or a drafter's, are left out."""
        self._num_steps += 1
        entries = plan.scheduled
        if any(entry.is_prefill or entry.draft_feed is not None for entry in entries):
            return
        used: dict[str, int] = {}  # k of each method that drafts or keeps up
        for entry in entries:
            if entry.method != NO_METHOD:
                used[entry.method] = max(entry.num_next_drafts, used.get(entry.method, 0))
        drafting = [method for method, k in used.items() if k > 0]
        label = NO_METHOD if not drafting else drafting[0] if len(drafting) == 1 else SEVERAL
        rows_per_request = plan.num_scheduled_tokens / len(entries)
        self._costs.observe_verify(len(entries), label, rows_per_request, seconds - draft_seconds)
        self._costs.observe_drafts(used, len(entries), draft_seconds)

    def forget(self, request: Request) -> None:
        self._states.pop(request, None)

    def _max_drafts(self, name: str) -> int:
        if name == AUTO_METHOD:
            return max((method.max_drafts for method in self.methods.values()), default=0)
        return super()._max_drafts(name)

    def _name(self, message: AddRequest) -> str:
        return self._asked(message)

    # ---- "auto" --------------------------------------------------------------------------------------------

    def _review(self, request: Request, state: _RequestState) -> None:
        """Choose what is fastest; keep the current choice while nothing is faster by the margin."""
        usable = self._usable(request)
        for method, acceptance in state.acceptance.items():
            if state.choice is None or method != _drafting(state.choice):
                acceptance.fade()
        current = state.choice = state.choice or DraftChoice(usable[0].name, _cap(request, usable[0]))
        speeds = dict(self._speeds(request, state, usable))
        if not speeds:  # nothing is measured yet
            return
        best_gain = 1.0
        for choice, speed in speeds.items():
            is_near = choice.k == 0 or choice.method == current.method
            gain = speed / speeds[current] / (MARGIN if is_near else METHOD_MARGIN)
            if gain > best_gain:
                state.choice, best_gain = choice, gain
        self._price_probes(request, state, speeds)

    def _speeds(
        self, request: Request, state: _RequestState, methods: Sequence[DraftMethod]
    ) -> Iterator[tuple[DraftChoice, float]]:
        """Expected tokens per second and request, of plain decoding and of each k; nothing while the costs are not
        known."""
        num_decoding = state.num_decoding
        plain_seconds = self._costs.verify(num_decoding, NO_METHOD, 1.0)
        if plain_seconds is None:
            return
        plain = _plain(request)
        yield plain, 1.0 / (plain_seconds + self._costs.draft(plain.method, num_decoding, 0))
        for method in methods:
            acceptance = state.acceptance.get(method.name, self._acceptance[method.name])
            found, accepted = acceptance.found, expected_accepted(acceptance, _cap(request, method))
            for k in range(1, len(accepted)):
                seconds = self._verify_seconds(num_decoding, method.name, found, k)
                seconds += self._costs.draft(method.name, num_decoding, k)
                yield DraftChoice(method.name, k), (1.0 + found * accepted[k]) / seconds

    def _verify_seconds(self, num_decoding: int, method: str, found: float, k: int) -> float:
        """One request has all of its drafts in a step, or none; of many the mean stands."""
        if num_decoding > 1:
            return self._costs.verify(num_decoding, method, 1.0 + found * k) or 0.0
        with_drafts = self._costs.verify(num_decoding, method, 1.0 + k) or 0.0
        without = self._costs.verify(num_decoding, method, 1.0) or 0.0
        return found * with_drafts + (1.0 - found) * without

    def _price_probes(
        self, request: Request, state: _RequestState, speeds: Mapping[DraftChoice, float]
    ) -> None:
        """Each method that is not chosen is probed with its best k, as often as what that costs allows."""
        assert state.choice is not None
        if state.choice.k > 0:
            plain_probe = self._plain_probes.setdefault(
                bucket(state.num_decoding), PlainProbe(first_step=self._num_steps)
            )
            plain_probe.price(self._num_steps, 1.0 - speeds[_plain(request)] / speeds[state.choice])
        for index, method in enumerate(self._usable(request)):
            if method.name == _drafting(state.choice):
                continue
            ks = range(1, _cap(request, method) + 1)
            best = max((DraftChoice(method.name, k) for k in ks), key=lambda choice: speeds[choice])
            probe = state.probes.setdefault(method.name, MethodProbe(index, self._num_steps))
            state.probe_drafts[method.name] = max(best.k, min(MIN_PROBE_DRAFTS, len(ks)))
            probe.price(1.0 - speeds[best._replace(k=state.probe_drafts[method.name])] / speeds[state.choice])

    def _probe(self, request: Request, state: _RequestState, choice: DraftChoice) -> DraftChoice | None:
        """Something else for one step, when its turn has come."""
        if choice.k > 0:
            plain_probe = self._plain_probes.get(bucket(state.num_decoding))
            if plain_probe is not None and plain_probe.is_due(self._num_steps):
                return _plain(request)
        for method, probe in state.probes.items():
            if probe.is_due(self._num_steps) and method != _drafting(choice):
                return DraftChoice(method, state.probe_drafts[method])
        return None

    def _usable(self, request: Request) -> list[DraftMethod]:
        """Methods without KV of their own, and the one that has seen all of the request."""
        return [
            method for method in self._candidates if not method.has_own_kv or method is request.draft_method
        ]


def _drafting(choice: DraftChoice) -> str:
    return choice.method if choice.k > 0 else NO_METHOD


def _plain(request: Request) -> DraftChoice:
    """No drafts; a method that has to see every step does, so that it can come back."""
    own = request.draft_method
    keeps_up = own is not None and own.keeps_up
    return DraftChoice(own.name if own is not None and keeps_up else NO_METHOD, 0, not_drafted.K_ZERO)


def _cap(request: Request, method: DraftMethod) -> int:
    k = request.message.speculation.num_speculative_tokens
    return method.max_drafts if k is None else min(k, method.max_drafts)
