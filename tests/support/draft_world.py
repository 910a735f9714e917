"""A world in which the right drafts, their costs and the clock are known: how fast a draft policy decodes in it, and
how fast the best fixed method and k does, on the very same text.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine.draft_method import DraftMethod
from engine.request import NO_METHOD, Request
from engine.scheduler.draft_policy import DraftChoice, DraftPolicy, FixedDraftPolicy
from engine.scheduler.replays import Replays
from engine.spec_decode.replay import LookupReplay
from engine.step import RowResult, ScheduledRequest, StepPlan
from tests.support.scheduler_harness import make_policy_request

MAX_DRAFTS = 5
RIGHT, WRONG = 0, 1  # all tokens of a text are the same
WARM_UP_STEPS = 2  # of each shape are slow, where the world has a warm-up


@dataclass(frozen=True)
class Drafter:
    """`rate(position, step)`: probability that draft `step` for the token at `position` is right, given that those
    before it were. `found(position)`: probability that there are drafts. Seconds in units of a plain step."""

    rate: Callable[[int, int], float]
    found: Callable[[int], float] = lambda position: 1.0
    start_seconds: float = 0.0
    seconds_per_draft: float = 0.0
    keep_up_seconds: float | None = None  # None: it keeps nothing
    is_replayed: bool = False  # what it would have drafted is known once the text is


@dataclass(frozen=True, kw_only=True)
class World:
    """`verify_seconds(num_rows)`: of a step, without drafting. `noise`: standard deviation of the clock, relative."""

    drafters: Mapping[str, Drafter]
    verify_seconds: Callable[[float], float] = lambda num_rows: 0.95 + 0.05 * num_rows
    num_requests: int = 1
    noise: float = 0.05
    warm_up: float = 1.0  # how much slower the first steps of a shape are
    drift: float = 0.0  # by how much all steps grow slower over 2,000 tokens of each request
    rate_spread: float = 0.0  # request i of n has rates multiplied by 1 - spread * i / n

    @property
    def methods(self) -> list[DraftMethod]:
        return [
            DraftMethod(
                name=name,
                max_drafts=MAX_DRAFTS,
                kv_groups=() if drafter.keep_up_seconds is None else (1,),
                catch_up="nothing" if drafter.keep_up_seconds is None else "hidden",
                is_replayed=drafter.is_replayed,
            )
            for name, drafter in self.drafters.items()
        ]


class _WorldReplay(LookupReplay):
    """`cache_salt`: the number of the request."""

    def __init__(
        self, verify: Callable[[int, int, DraftChoice], RowResult], method: str, cache_salt: str
    ) -> None:
        self._verify = verify
        self._method = method
        self._index = int(cache_salt)
        self._num_read = 0

    def read(self, token_ids: Sequence[int]) -> None:
        self._num_read += len(token_ids)

    def propose(self, max_drafts: int) -> list[int]:
        position = self._num_read - 2  # prompt and first token come before
        result = self._verify(self._index, position, DraftChoice(self._method, max_drafts))
        num_wrong = result.num_drafted - result.num_accepted
        return [RIGHT] * result.num_accepted + [WRONG] * num_wrong


class Simulation:
    """Requests that decode for ever. What is found and right belongs to the text: the same for every policy."""

    def __init__(self, world: World, choose: Callable[[Request, int], DraftChoice], seed: int = 0) -> None:
        self._world = world
        self._choose = choose
        self._seed = seed
        self._clock = random.Random(seed)
        self._shapes: Counter[tuple[int, str, int]] = Counter()
        self.num_steps = 0

    def speed(self, num_tokens: int, policy: DraftPolicy, requests: Sequence[Request]) -> float:
        """Tokens a second until there are `num_tokens` for each request on average."""
        world, count = self._world, len(requests)
        asked = [DraftChoice(NO_METHOD, 0)] * count
        positions = [0] * count
        seconds = 0.0
        replays = self._follow(requests, policy)
        while sum(positions) < num_tokens * count:
            self.num_steps += 1
            results, entries = [], []
            for index, request in enumerate(requests):
                results.append(self._verify(index, positions[index], asked[index]))
                asked[index] = self._choose(request, count)
                entries.append(_entry(index, results[-1].num_drafted, asked[index]))
            plan = StepPlan(step=self.num_steps, scheduled=entries)
            age = 1.0 + world.drift * sum(positions) / (2000 * count)
            draft_seconds = age * self._draft_seconds(requests, asked)
            verify_seconds = age * world.verify_seconds(plan.num_scheduled_tokens)
            seconds += draft_seconds + verify_seconds
            measured = self._slowness(plan) * self._clock.gauss(1.0, world.noise)
            policy.observe_step(plan, measured * (draft_seconds + verify_seconds), measured * draft_seconds)
            for index, request in enumerate(requests):
                positions[index] += results[index].num_accepted + 1
                policy.observe_result(request, results[index])
                request.token_ids += [RIGHT] * (results[index].num_accepted + 1)
            for request, replay in replays.run(requests):
                policy.observe_replay(request, replay)
        return sum(positions) / seconds

    def _follow(self, requests: Sequence[Request], policy: DraftPolicy) -> Replays:
        """The texts hold one token before the first drafts."""
        replays = Replays(
            {
                method: partial(_WorldReplay, self._verify, method)
                for method, drafter in self._world.drafters.items()
                if drafter.is_replayed
            },
            clock=lambda: 0.0,
        )
        replays.grant(1.0)
        for request in requests:
            request.token_ids.append(RIGHT)
            replays.follow(request, policy.replayed(request))
        return replays

    def _verify(self, index: int, position: int, asked: DraftChoice) -> RowResult:
        if asked.k == 0:
            return RowResult(token_ids=[0])
        drafter = self._world.drafters[asked.method]
        text = _mix(self._seed, index, len(asked.method) + ord(asked.method[0]))
        if _uniform(text, position, 0) >= drafter.found(position):
            return RowResult(token_ids=[0], draft_method=asked.method)
        luck = 1.0 - self._world.rate_spread * index / self._world.num_requests
        num_accepted = 0
        while num_accepted < asked.k:
            drafted_at = position + num_accepted
            if _uniform(text, drafted_at, 1) >= luck * drafter.rate(drafted_at, num_accepted):
                break
            num_accepted += 1
        return RowResult(num_drafted=asked.k, num_accepted=num_accepted, draft_method=asked.method)

    def _draft_seconds(self, requests: Sequence[Request], asked: Sequence[DraftChoice]) -> float:
        """A drafter runs once for all requests that ask it, as long as the one that asks most; or keeps up for all
        that use it otherwise."""
        seconds = 0.0
        for name, drafter in self._world.drafters.items():
            ks = [choice.k for choice in asked if choice.method == name]
            if any(ks):
                seconds += drafter.start_seconds + drafter.seconds_per_draft * max(ks)
            elif drafter.keep_up_seconds is not None and any(
                request.draft_method is not None and request.draft_method.name == name for request in requests
            ):
                seconds += drafter.keep_up_seconds
        return seconds

    def _slowness(self, plan: StepPlan) -> float:
        last = plan.scheduled[-1]
        shape = (plan.num_scheduled_tokens, last.method, last.num_next_drafts)
        self._shapes[shape] += 1
        return self._world.warm_up if self._shapes[shape] <= WARM_UP_STEPS else 1.0


def _mix(*values: int) -> int:
    """64 bits that look random, a function of the values (splitmix64)."""
    state = 0
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def _uniform(*values: int) -> float:
    return _mix(*values) / 2**64


def policy_speed(world: World, policy: DraftPolicy, num_tokens: int = 2000, seed: int = 0) -> float:
    """Of requests that leave everything to the policy, from a cold start."""
    requests = [
        make_policy_request(policy, f"r{index}", method="auto", cache_salt=str(index))
        for index in range(world.num_requests)
    ]
    return Simulation(world, policy.choose, seed).speed(num_tokens, policy, requests)


def best_fixed_speed(world: World, num_tokens: int = 2000, seed: int = 0) -> tuple[float, DraftChoice]:
    """The fastest of no drafts and every method and k."""
    policy = FixedDraftPolicy(world.methods)
    choices = [DraftChoice(NO_METHOD, 0)]
    choices += [DraftChoice(name, k) for name in world.drafters for k in range(1, MAX_DRAFTS + 1)]
    speeds = []
    for choice in choices:
        requests = [
            make_policy_request(policy, f"r{index}", method=choice.method)
            for index in range(world.num_requests)
        ]

        def choose(request: Request, num_decoding: int, choice: DraftChoice = choice) -> DraftChoice:
            return choice

        speeds.append(Simulation(world, choose, seed).speed(num_tokens, policy, requests))
    return max(zip(speeds, choices, strict=True), key=lambda pair: pair[0])


def _entry(row: int, num_drafted: int, asked: DraftChoice) -> ScheduledRequest:
    return ScheduledRequest(
        row=row,
        num_tokens=1 + num_drafted,
        num_drafts=num_drafted,
        max_seq_len=1,
        method=asked.method,
        num_next_drafts=asked.k,
    )
