"""The draft policy that serves "auto": method and k by expected tokens per second, down to no drafts at all.

Speeds come from draft_speeds.py, for a request by itself. Of lookup methods it is known without asking them how good
they are (replays.py), and whether they are right just now: while they are, the choice may be another one. A choice is
kept until another is better by a margin. What is not in use is tried now and then (probes.py). Nothing here reads a
clock or draws random numbers: the same history gives the same choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.draft_method import DraftMethod
from engine.messages import AddRequest
from engine.request import NO_METHOD, Request
from engine.scheduler import not_drafted
from engine.scheduler.acceptance import RequestAcceptance
from engine.scheduler.draft_policy import AUTO_METHOD, NO_DRAFTS, DraftChoice, FixedDraftPolicy
from engine.scheduler.draft_speeds import MIN_RUN, DraftSource, DraftSpeeds
from engine.scheduler.probes import BUDGET, MethodProbe, PlainProbe
from engine.scheduler.replays import Replay
from engine.scheduler.step_costs import bucket
from engine.step import RowResult, StepPlan

MARGIN = 1.01  # by how much a choice must be better to replace the current one
METHOD_MARGIN = 1.03  # the same for drafts of another method
EARLY_REVIEWS = (2, 4)  # choices of a request before it looks at the alternatives for the first times
REVIEW_INTERVAL = 8  # choices between two looks from then on
MIN_PROBE_DRAFTS = 2  # of a probe, even if one would be best


@dataclass(slots=True)
class _RequestState:
    choice: DraftChoice | None = None  # the newest, probes apart
    num_choices: int = 0
    num_decoding: int = 1  # in the step of the last review
    is_review_due: bool = True
    matches: frozenset[str] = frozenset()  # methods that are in a match
    kept: dict[frozenset[str], DraftChoice] = field(default_factory=dict)  # by `matches`
    reviewed: set[frozenset[str]] = field(default_factory=set)  # keys of `kept`, since the last review
    speeds: dict[DraftSource, list[float]] = field(default_factory=dict)  # by k, as of the last review
    acceptance: dict[DraftSource, RequestAcceptance] = field(default_factory=dict)
    probes: dict[str, MethodProbe] = field(default_factory=dict)  # by method
    probe_drafts: dict[str, int] = field(default_factory=dict)  # by method: k of a probe


class AdaptiveDraftPolicy(FixedDraftPolicy):
    """Requests that name a method, or none, get what they ask for; it learns from them what no replay tells."""

    def __init__(self, methods: Sequence[DraftMethod], default: str | None = None) -> None:
        super().__init__(methods, default)
        # Methods without KV of their own come first: of equals they are cheaper.
        self._candidates = sorted(methods, key=lambda method: method.has_own_kv)
        self._speeds = DraftSpeeds(methods)
        self._plain_probes: dict[int, PlainProbe] = {}  # by bucket of decoding requests
        self._states: dict[Request, _RequestState] = {}
        self._num_steps = 0
        self._feed_allowance = 0.0  # seconds that probes may take to catch up

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
        if state.is_review_due:
            self._begin_review(state, num_decoding)
        if state.matches not in state.reviewed:
            state.kept[state.matches] = self._review(request, state, state.kept.get(state.matches))
        state.choice = state.kept[state.matches]
        return self._probe(request, state, state.choice) or state.choice

    def observe_result(self, request: Request, result: RowResult) -> None:
        """Of lookup methods replays tell more: at each k, in use or not."""
        method = result.draft_method
        if method not in self.methods or self.methods[method].is_replayed:
            return
        source = DraftSource(method)
        state = self._states.get(request)
        if state is not None:
            acceptance = self._acceptance_of(state, source)
            if method in state.probes and method != _drafting(state.choice):
                is_surprise = acceptance.is_surprise(result.num_drafted, result.num_accepted)
                state.probes[method].learn(is_surprise=is_surprise)
                state.is_review_due |= is_surprise
            acceptance.observe(result.num_drafted, result.num_accepted)
        self._speeds.acceptance[source].observe(result.num_drafted, result.num_accepted)

    def replayed(self, request: Request) -> dict[str, int]:
        if request.draft_method is None or self._name(request.message) != AUTO_METHOD:
            return {}
        return {method.name: _cap(request, method) for method in self._candidates if method.is_replayed}

    def observe_replay(self, request: Request, replay: Replay) -> None:
        if replay.method not in self.methods:  # it was, when the request came
            return
        state = self._states.setdefault(request, _RequestState())
        for num_asked, num_drafted, num_accepted, run_before in replay.outcomes:
            source = DraftSource(replay.method, run_before >= MIN_RUN)
            acceptance = self._acceptance_of(state, source)
            if replay.method != _drafting(state.choice):
                state.is_review_due |= acceptance.is_surprise(num_drafted, num_accepted)
            acceptance.observe(num_drafted, num_accepted, num_asked)
            self._speeds.acceptance[source].observe(num_drafted, num_accepted, num_asked)
        in_match = {replay.method} if replay.run >= MIN_RUN else set()
        state.matches = (state.matches - {replay.method}) | in_match

    def observe_step(self, plan: StepPlan, seconds: float, draft_seconds: float) -> None:
        self._num_steps += 1
        self._feed_allowance += BUDGET * seconds
        self._speeds.observe_step(plan, seconds, draft_seconds)

    def forget(self, request: Request) -> None:
        self._states.pop(request, None)

    def _max_drafts(self, name: str) -> int:
        if name == AUTO_METHOD:
            return max((method.max_drafts for method in self.methods.values()), default=0)
        return super()._max_drafts(name)

    def _name(self, message: AddRequest) -> str:
        return self._asked(message)

    # ---- "auto" --------------------------------------------------------------------------------------------

    def _begin_review(self, state: _RequestState, num_decoding: int) -> None:
        """What was learnt since the last one counts from now on."""
        state.is_review_due = False
        state.num_decoding = max(num_decoding, 1)
        state.reviewed.clear()
        state.speeds.clear()
        for source, acceptance in state.acceptance.items():
            if not self.methods[source.method].is_replayed and source.method != _drafting(state.choice):
                acceptance.fade()

    def _review(self, request: Request, state: _RequestState, current: DraftChoice | None) -> DraftChoice:
        """What is fastest, given what is in a match; the current choice while nothing is faster by the margin."""
        state.reviewed.add(state.matches)
        usable = self._usable(request)
        speeds = dict(self._choices(request, state, usable))
        if not speeds:  # nothing is measured yet
            return current or DraftChoice(usable[0].name, _cap(request, usable[0]))
        best, best_gain = current, 1.0
        for choice, speed in speeds.items():
            if current is None:
                gain = speed
            else:
                is_near = choice.k == 0 or choice.method == current.method
                gain = speed / speeds[current] / (MARGIN if is_near else METHOD_MARGIN)
            if best is None or gain > best_gain:
                best, best_gain = choice, gain
        assert best is not None
        self._price_probes(request, state, best, speeds)
        return best

    def _choices(
        self, request: Request, state: _RequestState, methods: Sequence[DraftMethod]
    ) -> Iterator[tuple[DraftChoice, float]]:
        """No drafts and each k of each method, with their speeds; nothing while the costs are not known."""
        plain = _plain(request)
        plain_speed = self._speeds.plain(state.num_decoding, plain.method)
        if plain_speed is None:
            return
        yield plain, plain_speed
        for method in methods:
            source = DraftSource(method.name, method.name in state.matches)
            if source not in state.speeds:
                state.speeds[source] = self._speeds.drafting(
                    request, source, state.acceptance.get(source), state.num_decoding, _cap(request, method)
                )
            for k, speed in enumerate(state.speeds[source], start=1):
                yield DraftChoice(method.name, k), speed

    def _acceptance_of(self, state: _RequestState, source: DraftSource) -> RequestAcceptance:
        return state.acceptance.setdefault(source, RequestAcceptance(self._speeds.acceptance[source]))

    def _price_probes(
        self,
        request: Request,
        state: _RequestState,
        chosen: DraftChoice,
        speeds: Mapping[DraftChoice, float],
    ) -> None:
        """Each method that is not chosen is probed with its best k, as often as what that costs allows."""
        if chosen.k > 0:
            plain_probe = self._plain_probes.setdefault(
                bucket(state.num_decoding), PlainProbe(first_step=self._num_steps)
            )
            plain_probe.price(self._num_steps, 1.0 - speeds[_plain(request)] / speeds[chosen])
        for index, method in enumerate(self._usable(request)):
            if method.name == _drafting(chosen):
                continue
            ks = range(1, _cap(request, method) + 1)
            best = max((DraftChoice(method.name, k) for k in ks), key=lambda choice: speeds[choice])
            probe = state.probes.setdefault(
                method.name, MethodProbe(index, self._num_steps, method.is_replayed)
            )
            state.probe_drafts[method.name] = max(best.k, min(MIN_PROBE_DRAFTS, len(ks)))
            probe.price(1.0 - speeds[best._replace(k=state.probe_drafts[method.name])] / speeds[chosen])

    def _probe(self, request: Request, state: _RequestState, choice: DraftChoice) -> DraftChoice | None:
        """Something else for one step, when its turn has come."""
        if choice.k > 0:
            plain_probe = self._plain_probes.get(bucket(state.num_decoding))
            if plain_probe is not None and plain_probe.is_due(self._num_steps):
                return _plain(request)
        for method, probe in state.probes.items():
            if probe.is_due(self._num_steps) and method != _drafting(choice):
                seconds = self._speeds.catch_up_seconds(request, method)
                if seconds <= self._feed_allowance:
                    self._feed_allowance -= seconds
                    return DraftChoice(method, state.probe_drafts[method])
        return None

    def _usable(self, request: Request) -> list[DraftMethod]:
        """Methods without KV of their own, and the one that has seen all of the request."""
        return [
            method for method in self._candidates if not method.has_own_kv or method is request.draft_method
        ]


def _drafting(choice: DraftChoice | None) -> str:
    return NO_METHOD if choice is None or choice.k == 0 else choice.method


def _plain(request: Request) -> DraftChoice:
    """No drafts; a method that has to see every step does, so that it can come back."""
    own = request.draft_method
    keeps_up = own is not None and own.keeps_up
    return DraftChoice(own.name if own is not None and keeps_up else NO_METHOD, 0, not_drafted.K_ZERO)


def _cap(request: Request, method: DraftMethod) -> int:
    k = request.message.speculation.num_speculative_tokens
    return method.max_drafts if k is None else min(k, method.max_drafts)
