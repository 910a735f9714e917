"""The adaptive policy in a simulated engine: known acceptance, known costs, no clock but the simulated one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import pytest

from engine.draft_method import DraftMethod
from engine.errors import InvalidRequestError
from engine.request import Request
from engine.scheduler.adaptive_policy import AdaptiveDraftPolicy
from engine.scheduler.draft_policy import DraftChoice, FixedDraftPolicy
from engine.scheduler.draft_speeds import DraftSource
from engine.scheduler.probes import BUDGET
from engine.scheduler.replays import Replay, Replayed
from engine.step import DraftFeed, RowResult, ScheduledRequest, StepPlan
from tests.support import draft_world
from tests.support.scheduler_harness import SchedulerHarness, make_policy_request, make_request

NGRAM = DraftMethod(name="ngram", max_drafts=6)
DRAFT_MODEL = DraftMethod(name="draft_model", max_drafts=4, kv_groups=(1,), catch_up="tokens")
EAGLE = DraftMethod(name="eagle", max_drafts=6, kv_groups=(1,), catch_up="hidden")


@dataclass(frozen=True)
class Drafter:
    rate: Callable[[int], float]  # step -> probability that a draft is accepted, given those before it
    found: float = 1.0
    start_seconds: float = 0.0
    seconds_per_draft: float = 0.0


@dataclass
class World:
    """Seconds of a step: those of its verification rows, and those of the drafters that are used in it."""

    drafters: Mapping[str, Drafter]
    base_seconds: float = 1.0
    seconds_per_row: float = 0.05

    def seconds(self, num_rows: int) -> float:
        return self.base_seconds + self.seconds_per_row * num_rows

    def best_speed(self, num_requests: int, max_drafts: int = 6) -> float:
        """Tokens a second of the best fixed choice, at the rates of step 0."""
        speeds = [num_requests / self.seconds(num_requests)]
        for drafter in self.drafters.values():
            for k in range(1, max_drafts + 1):
                rate = drafter.rate(0)
                tokens = 1 + drafter.found * sum(rate**step for step in range(1, k + 1))
                rows = num_requests * (1 + drafter.found * k)
                seconds = self.base_seconds + self.seconds_per_row * rows
                speeds.append(
                    num_requests * tokens / (seconds + drafter.start_seconds + drafter.seconds_per_draft * k)
                )
        return max(speeds)


class Simulation:
    """Requests that decode for ever, one step after the other."""

    def __init__(
        self, policy: AdaptiveDraftPolicy, world: World, num_requests: int = 1, seed: int = 0
    ) -> None:
        self.policy, self.world = policy, world
        self.requests = [
            make_policy_request(policy, f"r{index}", method="auto") for index in range(num_requests)
        ]
        self.asked = [DraftChoice("none", 0)] * num_requests
        self.choices: list[DraftChoice] = []
        self.num_tokens = 0
        self.seconds = 0.0
        self._generator = random.Random(seed)
        self._step = 0

    def run(self, num_steps: int) -> Counter[DraftChoice]:
        """What was chosen in these steps."""
        first = len(self.choices)
        for _ in range(num_steps):
            self._run_step()
        return Counter(choice._replace(reason="") for choice in self.choices[first:])

    def speed(self, num_steps: int) -> float:
        before = self.num_tokens, self.seconds
        self.run(num_steps)
        return (self.num_tokens - before[0]) / (self.seconds - before[1])

    def _run_step(self) -> None:
        self._step += 1
        entries, results = [], []
        for index, request in enumerate(self.requests):
            verified, choice = self.asked[index], self.policy.choose(request, len(self.requests))
            self.asked[index] = choice
            self.choices.append(choice)
            results.append(self._verify(verified))
            entries.append(
                ScheduledRequest(
                    row=index,
                    num_tokens=1 + results[-1].num_drafted,
                    max_seq_len=1,
                    method=choice.method,
                    num_next_drafts=choice.k,
                )
            )
        plan = StepPlan(step=self._step, scheduled=entries)
        draft_seconds = self._draft_seconds()
        seconds = self.world.seconds(plan.num_scheduled_tokens) + draft_seconds
        self.policy.observe_step(plan, seconds, draft_seconds)
        for request, result in zip(self.requests, results, strict=True):
            self.policy.observe_result(request, result)
            self.num_tokens += result.num_accepted + 1
        self.seconds += seconds

    def _draft_seconds(self) -> float:
        ks: dict[str, int] = {}
        for choice in self.asked:
            if choice.k > 0:
                ks[choice.method] = max(ks.get(choice.method, 0), choice.k)
        drafters = self.world.drafters
        return sum(
            drafters[name].start_seconds + drafters[name].seconds_per_draft * k for name, k in ks.items()
        )

    def _verify(self, asked: DraftChoice) -> RowResult:
        if asked.k == 0:
            return RowResult(token_ids=[0])
        drafter = self.world.drafters[asked.method]
        if self._generator.random() >= drafter.found:
            return RowResult(token_ids=[0], draft_method=asked.method)
        num_accepted = 0
        while num_accepted < asked.k and self._generator.random() < drafter.rate(self._step):
            num_accepted += 1
        return RowResult(num_drafted=asked.k, num_accepted=num_accepted, draft_method=asked.method)


def always(rate: float) -> Callable[[int], float]:
    return lambda step: rate


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("seconds_per_row", [0.0, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.8, 0.95])
def test_speed_comes_near_the_best_fixed_choice(
    rate: float, seconds_per_row: float, num_requests: int
) -> None:
    drafter = Drafter(always(rate), start_seconds=0.05, seconds_per_draft=0.05)
    world = World({"ngram": drafter}, seconds_per_row=seconds_per_row / num_requests)
    simulation = Simulation(AdaptiveDraftPolicy([NGRAM]), world, num_requests)
    simulation.run(300)
    assert simulation.speed(1500) > 0.94 * world.best_speed(num_requests)


def test_a_useless_drafter_is_hardly_ever_asked() -> None:
    world = World({"ngram": Drafter(always(0.0), seconds_per_draft=0.05)})
    simulation = Simulation(AdaptiveDraftPolicy([NGRAM]), world)
    simulation.run(200)
    chosen = simulation.run(1000)
    assert sum(count for choice, count in chosen.items() if choice.k > 0) <= 1000 / 32
    assert all(choice.reason == "k_zero" for choice in simulation.choices[-1000:] if choice.k == 0)


def test_a_useless_lookup_is_asked_even_less() -> None:
    """Without asking it is known to be useless; a probe is there for its cost."""
    drafter = draft_world.Drafter(lambda position, step: 0.0, is_replayed=True)
    world = draft_world.World(drafters={"ngram": drafter})
    policy = AdaptiveDraftPolicy(world.methods)
    choices: list[DraftChoice] = []

    def choose(request: Request, num_decoding: int) -> DraftChoice:
        choices.append(policy.choose(request, num_decoding))
        return choices[-1]

    request = make_policy_request(policy, "r0", method="auto", cache_salt="0")
    draft_world.Simulation(world, choose).speed(1200, policy, [request])
    assert 1 <= sum(choice.k > 0 for choice in choices[200:]) <= 10


def test_a_drafter_that_becomes_good_comes_back() -> None:
    world = World({"ngram": Drafter(lambda step: 0.0 if step < 400 else 0.95)})
    simulation = Simulation(AdaptiveDraftPolicy([NGRAM]), world)
    simulation.run(300)
    assert simulation.run(100)[DraftChoice("none", 0)] > 90
    simulation.run(800)
    chosen = simulation.run(200)
    assert sum(count for choice, count in chosen.items() if choice.k >= 4) > 180


def test_a_drafter_that_becomes_useless_is_left() -> None:
    world = World({"ngram": Drafter(lambda step: 0.95 if step < 300 else 0.0)})
    simulation = Simulation(AdaptiveDraftPolicy([NGRAM]), world)
    assert simulation.run(300).most_common(1)[0][0].k >= 4
    simulation.run(300)
    assert simulation.run(100)[DraftChoice("none", 0)] > 80


@pytest.mark.parametrize(("ngram_found", "expected"), [(0.9, "ngram"), (0.05, "eagle")])
def test_prompt_lookup_is_preferred_where_it_finds_something(ngram_found: float, expected: str) -> None:
    drafters = {
        "ngram": Drafter(always(0.9), found=ngram_found),
        "eagle": Drafter(always(0.7), start_seconds=0.1, seconds_per_draft=0.1),
    }
    simulation = Simulation(AdaptiveDraftPolicy([EAGLE, NGRAM]), World(drafters))
    simulation.run(300)
    methods = Counter[str]()
    for choice, count in simulation.run(300).items():
        methods[choice.method] += count
    assert methods[expected] > 270


def test_requests_of_different_luck_get_different_choices() -> None:
    """One request's drafts are always right, another's never."""
    policy = AdaptiveDraftPolicy([NGRAM])
    lucky, unlucky = (make_policy_request(policy, name, method="auto") for name in ("lucky", "unlucky"))
    k = {lucky: 0, unlucky: 0}
    for step in range(300):
        for request, rate in ((lucky, 1), (unlucky, 0)):
            policy.observe_result(
                request,
                RowResult(
                    num_drafted=k[request],
                    num_accepted=rate * k[request],
                    draft_method="ngram" if k[request] else "none",
                ),
            )
        rows = [
            ScheduledRequest(row=0, num_tokens=1 + k[lucky], max_seq_len=1),
            ScheduledRequest(row=1, num_tokens=1 + k[unlucky], max_seq_len=1),
        ]
        plan = StepPlan(step=step, scheduled=rows)
        policy.observe_step(plan, 1.0 + 0.3 * plan.num_scheduled_tokens, 0.0)
        k = {request: policy.choose(request, 2).k for request in k}
    chosen = [(policy.choose(lucky, 2).k, policy.choose(unlucky, 2).k) for _ in range(3)]
    assert Counter(chosen).most_common(1)[0][0] == (6, 0)


def test_the_choice_does_not_flutter_between_equals() -> None:
    drafters = {"ngram": Drafter(always(0.7)), "suffix": Drafter(always(0.7))}
    methods = [NGRAM, DraftMethod(name="suffix", max_drafts=6, is_host=True)]
    simulation = Simulation(AdaptiveDraftPolicy(methods), World(drafters))
    simulation.run(400)
    (request,) = simulation.requests
    kept = []
    for _ in range(400):
        simulation.run(1)
        choice = simulation.policy._states[request].choice
        assert choice is not None
        kept.append(choice.method)
    assert sum(one != other for one, other in pairwise(kept)) <= 10


def test_k_of_the_request_is_the_bound_and_plain_steps_keep_the_drafter_up() -> None:
    policy = AdaptiveDraftPolicy([NGRAM, EAGLE])
    request = make_policy_request(policy, "a", method="auto", k=2)
    assert request.draft_method is EAGLE
    choices = [policy.choose(request, 1) for _ in range(50)]
    assert max(choice.k for choice in choices) <= 2
    assert {choice.method for choice in choices if choice.k == 0} <= {"eagle"}


def test_fixed_wishes_are_served_beside_auto() -> None:
    policy = AdaptiveDraftPolicy([NGRAM, EAGLE])
    for method, k, expected in [
        ("eagle", 2, DraftChoice("eagle", 2)),
        (None, None, DraftChoice("ngram", 6)),
        ("none", None, DraftChoice("none", 0, "disabled")),
        ("auto", 0, DraftChoice("none", 0, "disabled")),
    ]:
        request = make_policy_request(policy, "a", method=method, k=k)
        assert policy.choose(request, 1) == expected
    policy.validate(make_request("a", [8], method="auto", k=6))
    with pytest.raises(InvalidRequestError, match=r"got 7, expected 0\.\.6 for method 'auto'"):
        policy.validate(make_request("a", [8], method="auto", k=7))
    with pytest.raises(InvalidRequestError, match="got 'suffix'"):
        policy.validate(make_request("a", [8], method="suffix"))


def test_the_default_stands_for_what_a_request_leaves_unset() -> None:
    policy = AdaptiveDraftPolicy([NGRAM, EAGLE], "auto")
    request = make_policy_request(policy, "a")
    assert request.draft_method is EAGLE
    assert {policy.choose(request, 1).method for _ in range(20)} <= {"ngram", "eagle"}
    assert policy._states, "the policy chose"
    with pytest.raises(InvalidRequestError, match=r"got 7, expected 0\.\.6 for method 'auto'"):
        policy.validate(make_request("a", [8], k=7))
    policy = AdaptiveDraftPolicy([NGRAM, EAGLE], "eagle")
    assert policy.choose(make_policy_request(policy, "a", k=2), 1) == DraftChoice("eagle", 2)
    policy = AdaptiveDraftPolicy([NGRAM, EAGLE], "none")
    assert policy.choose(make_policy_request(policy, "a"), 1) == DraftChoice("none", 0, "disabled")
    assert policy.choose(make_policy_request(policy, "b", method="ngram"), 1) == DraftChoice("ngram", 6)


def test_auto_without_methods_is_plain_decoding() -> None:
    policy = AdaptiveDraftPolicy([])
    request = make_policy_request(policy, "a", method="auto")
    assert policy.choose(request, 1) == DraftChoice("none", 0, "disabled")


def test_prefill_steps_teach_no_costs() -> None:
    """Known fault 33: only decoding requests count."""
    policy = AdaptiveDraftPolicy([NGRAM])
    decode = ScheduledRequest(row=0, num_tokens=1, max_seq_len=1)
    chunk = ScheduledRequest(row=1, num_tokens=100, start=0, max_seq_len=100)
    for step in range(20):
        policy.observe_step(StepPlan(step=step, scheduled=[decode, chunk]), 9.0, 0.0)
    assert policy._speeds._costs.verify(1, "none", 1.0) is None


@pytest.fixture
def policy_with_draft_model() -> AdaptiveDraftPolicy:
    """Drafts of the draft model are always right; a step takes a second, and a token that it missed a tenth."""
    policy = AdaptiveDraftPolicy([NGRAM, DRAFT_MODEL])
    teacher = make_policy_request(policy, "teacher", method="draft_model")
    for step in range(100):
        k = step % 5
        feed = DraftFeed(0, 50 + 1 + k) if k and step % 20 == 1 else None
        entry = ScheduledRequest(
            row=0,
            num_tokens=1 + k,
            max_seq_len=1,
            method="draft_model" if k else "none",
            num_next_drafts=k,
            draft_feed=feed,
        )
        policy.observe_step(StepPlan(step=step, scheduled=[entry]), 6.0 if feed else 1.0, 0.01)
        policy.observe_result(
            teacher, RowResult(num_drafted=k, num_accepted=k, draft_method="draft_model" if k else "none")
        )
        policy._speeds.acceptance[DraftSource("ngram")].observe(2, 0)
    return policy


def request_behind(policy: AdaptiveDraftPolicy, num_missed: int) -> Request:
    """It has a long way to go."""
    request = make_policy_request(policy, f"{num_missed} behind", method="auto")
    request.num_computed_tokens = 1000
    request.next_draft_start = 1000 - num_missed
    request.token_limit = 2000
    return request


@pytest.mark.parametrize(("num_missed", "is_worth_it"), [(0, True), (50, True), (900, False)])
def test_a_drafter_that_is_behind_has_to_be_worth_catching_up(
    policy_with_draft_model: AdaptiveDraftPolicy, num_missed: int, is_worth_it: bool
) -> None:
    """64 tokens take 64 seconds without drafts, 13 with them: 5 to catch up are well spent, 90 are not."""
    choice = policy_with_draft_model.choose(request_behind(policy_with_draft_model, num_missed), 1)
    assert (choice.method == "draft_model") == is_worth_it


def test_probes_catch_up_only_within_their_budget(policy_with_draft_model: AdaptiveDraftPolicy) -> None:
    policy = policy_with_draft_model
    request = request_behind(policy, 900)
    plain = ScheduledRequest(row=0, num_tokens=1, max_seq_len=1)
    probed = []
    for step in range(100, 40_000):
        policy.observe_step(StepPlan(step=step, scheduled=[plain]), 1.0, 0.0)
        if policy.choose(request, 1).method == "draft_model":
            probed.append(step)
    assert 1 <= len(probed) <= 40_000 * BUDGET / 90, "900 tokens are caught up with in 90 seconds"


def test_replays_of_a_method_that_was_switched_off_are_ignored() -> None:
    policy = AdaptiveDraftPolicy([EAGLE])
    request = make_policy_request(policy, "a", method="auto")
    policy.observe_replay(request, Replay("ngram", [Replayed(5, 5, 5, 0)], 5))
    assert policy.choose(request, 1).method == "eagle"


def test_ended_requests_are_forgotten() -> None:
    policy = AdaptiveDraftPolicy([NGRAM])
    for index in range(100):
        request: Request = make_policy_request(policy, f"r{index}", method="auto")
        policy.choose(request, 1)
        policy.forget(request)
    assert not policy._states


# ---- in the scheduler --------------------------------------------------------------------------------------


class AlternatingPolicy(FixedDraftPolicy):
    """The method with KV of its own drafts in some steps; in others it keeps up, for another method or for none."""

    def choose(self, request: Request, num_decoding: int) -> DraftChoice:
        choices = [DraftChoice("scripted", 3), DraftChoice("lookup", 2), DraftChoice("scripted", 0, "k_zero")]
        return choices[len(request.token_ids) // 3 % 3]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_drafter_with_its_own_kv_keeps_up_while_another_one_drafts(depth: int, block_size: int) -> None:
    """Known fault 24. The fake device checks each entry of the drafter's KV that it reads."""
    harness = SchedulerHarness(
        k=3,
        depth=depth,
        block_size=block_size,
        num_blocks=512,
        has_drafter=True,
        make_policy=AlternatingPolicy,
        max_prefill_chunk=3,
        num_right=lambda k: k // 2,
    )
    harness.run(*[make_request(f"r{index}", range(8, 12 + index), max_tokens=40) for index in range(4)])
    keeping_up = [entry.keeps_up for plan in harness.plans for entry in plan.scheduled]
    assert set(keeping_up) == {"none", "scripted"}
