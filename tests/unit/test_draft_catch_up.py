"""A drafter that catches up costs nothing while others draft, or nobody: no forward pass, no blocks. When it is chosen
again it is fed what it missed, and drafts as if it had never been away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.request import Request
from engine.scheduler.draft_policy import DraftChoice, FixedDraftPolicy
from engine.spec_decode.speculator import DraftTokens, ProposalInputs
from engine.step import DraftFeed
from tests.support.draft_rounds import RoundChecker, record_rounds
from tests.support.engine_harness import Harness, Result, request
from tests.support.scheduler_harness import SchedulerHarness, make_request
from tests.support.tiny_drafters import Workshop, shared_workshop

METHOD = "draft_model"
PROMPT_LENGTH = 40

Choose = Callable[[int], DraftChoice]  # by confirmed tokens of the request


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory)


class Watched:
    """An engine with a draft model. `choose` decides who drafts; what the draft model computes is counted."""

    def __init__(self, workshop: Workshop, choose: Choose, **core: Any) -> None:
        self.speculator = workshop.draft_model(workshop.drafter(METHOD))
        self.rounds = record_rounds(self.speculator)
        self.passes: list[int] = []  # tokens of each forward pass of the draft model
        self._workshop = workshop
        forward = self.speculator.draft_forward

        def draft_forward(input_ids: torch.Tensor, *inputs: Any) -> Any:
            self.passes.append(len(input_ids))
            return forward(input_ids, *inputs)

        self.speculator.draft_forward = draft_forward  # type: ignore[method-assign]
        self.core: EngineCore = workshop.core(
            [workshop.drafter(METHOD)], speculators={METHOD: self.speculator}, **core
        )
        policy: Any = self.core._scheduler._draft_policy
        inner = policy.choose

        def choose_for(request: Request, num_decoding: int) -> DraftChoice:
            is_drafted = request.draft_method is not None
            return choose(len(request.token_ids)) if is_drafted else inner(request, num_decoding)

        policy.choose = choose_for

    def run(self, names: list[int]) -> dict[str, Result]:
        """The prompts of these numbers. Their text is that of plain decoding, and every draft is drawn from the right
        logits.
        """
        requests = [
            item
            for index, item in enumerate(self._workshop.requests("greedy", [(METHOD, 5)]))
            if index in names
        ]
        results = Harness(self.core).run(requests)
        for name, result in results.items():
            assert result.token_ids == self._workshop.plain("greedy")[name].token_ids, name
        if self.rounds:
            RoundChecker(self._workshop, METHOD).check(self.rounds)
        return results


def off_until(num_tokens: int, k: int = 3) -> Choose:
    return lambda length: DraftChoice(METHOD, k) if length >= num_tokens else DraftChoice("none", 0, "k_zero")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("off", [DraftChoice("none", 0, "k_zero"), DraftChoice(METHOD, 0, "k_zero")])
def test_a_request_without_drafts_costs_no_draft_forward(
    workshop: Workshop, off: DraftChoice, depth: int
) -> None:
    watched = Watched(workshop, lambda length: off, depth=depth)
    watched.run(list(range(16)))
    assert watched.passes == []
    pools = [group.pool for group in watched.core._scheduler._kv._groups]  # type: ignore[attr-defined]
    assert [pool.num_cached > 0 for pool in pools] == [True, False]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [None, 7, 12])
@pytest.mark.parametrize("gap", [0, 1, 2, 5, 9])
def test_after_a_gap_of_any_length_it_drafts_as_if_it_had_kept_up(
    workshop: Workshop, gap: int, chunk: int | None, depth: int
) -> None:
    """Off from the first token on, and on again `gap` tokens after the prompt."""
    watched = Watched(
        workshop, off_until(PROMPT_LENGTH + gap, k=1), depth=depth, max_prefill_chunk=chunk, block_size=4
    )
    result = watched.run([15])["r15"]
    assert result.spec, "it did not come back"
    if chunk is None:
        assert watched.passes[0] >= PROMPT_LENGTH, "it catches up at once"
    else:
        assert watched.passes[:3] == [chunk] * 3
        assert max(watched.passes) <= chunk + 2 * depth  # the last chunk, and what the step computed


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_of_a_prompt_that_are_tiny_close_the_gap_too(
    workshop: Workshop, chunk: int, depth: int
) -> None:
    """A step that only catches up adds a token to what is missed."""
    watched = Watched(workshop, off_until(PROMPT_LENGTH, k=1), depth=depth, max_prefill_chunk=chunk)
    assert watched.run([15])["r15"].spec, "it did not come back"


def test_in_turn_with_nothing_it_is_fed_each_token_once(workshop: Workshop) -> None:
    """On for 3 tokens, off for 5, and so on."""
    is_on = Watched(
        workshop,
        lambda length: DraftChoice(METHOD, 2) if length % 8 < 3 else DraftChoice("none", 0, "k_zero"),
        block_size=4,
    )
    results = is_on.run([15])
    # Draft prefills feed each token once, rejected drafts apart; every draft costs one token in the loop.
    num_rejected = sum(item.num_drafted - item.num_verifier_accepted for item in results["r15"].spec)
    num_drafts = sum(len(item.drafts) for item in is_on.rounds)
    assert sum(is_on.passes) <= PROMPT_LENGTH + 24 + num_rejected + num_drafts
    assert len(is_on.rounds) >= 3


@pytest.mark.parametrize("depth", [1, 2])
def test_periods_of_a_batch_with_preemption(workshop: Workshop, depth: int) -> None:
    watched = Watched(
        workshop,
        lambda length: DraftChoice(METHOD, 3) if length // 4 % 3 else DraftChoice("none", 0, "k_zero"),
        depth=depth,
        block_size=4,
        num_blocks=36,
        max_prefill_chunk=7,
    )
    results = watched.run(list(range(16)))
    assert any(result.num_preemptions for result in results.values())
    assert len(watched.rounds) > 50


@pytest.mark.drafter_fault
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failure_leaves_no_hole(workshop: Workshop, depth: int) -> None:
    """What a step that failed did not compute is computed with the next one."""
    watched = Watched(workshop, off_until(0), depth=depth, block_size=4, max_prefill_chunk=7)
    inner, calls = watched.speculator.propose, [0]

    def propose(inputs: ProposalInputs) -> DraftTokens:
        calls[0] += 1
        if calls[0] % 4 == 2:
            raise RuntimeError("the drafter is broken")
        return inner(inputs)

    watched.speculator.propose = propose  # type: ignore[method-assign]
    if depth == 1:
        watched.run(list(range(16)))
    else:  # the step in flight when one fails drafts over the hole: its logits are others, the text is the same
        with pytest.raises(AssertionError, match=r"draft \d of Round"):
            watched.run(list(range(16)))
    rounds, watched.rounds[:] = list(watched.rounds), []
    assert len(rounds) > 50
    watched.speculator.propose = inner  # type: ignore[method-assign]
    watched.run(list(range(16)))  # with hits on what was published


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [None, 7])
def test_a_hit_of_which_the_drafter_has_a_part(workshop: Workshop, chunk: int | None, depth: int) -> None:
    """A request with drafts leaves the first half of a prompt behind, one without them all of it; a third takes the
    whole hit, and its drafter catches up from its own part on.
    """
    prompt = workshop.prompts[15]
    watched = Watched(workshop, off_until(0), depth=depth, block_size=4, max_prefill_chunk=chunk)
    harness = Harness(watched.core)
    harness.run([request("half", prompt[:21], method=METHOD, k=3, max_tokens=4)])
    harness.run([request("plain", prompt, method="none", max_tokens=2)])
    watched.passes.clear()
    watched.rounds.clear()
    result = watched.run([15])["r15"]
    assert result.num_cached_tokens == 36
    assert watched.passes[0] == (20 if chunk is None else 7)  # 20 tokens have drafter KV, of 40


def starts_a_token_late(feed: DraftFeed) -> DraftFeed:
    return DraftFeed(feed.start + 1, feed.num_tokens - 1)


def ends_a_token_early(feed: DraftFeed) -> DraftFeed:
    return DraftFeed(feed.start, feed.num_tokens - 1)


@pytest.mark.parametrize("mutate", [starts_a_token_late, ends_a_token_early, lambda feed: None])
def test_a_mutant_is_found_and_loses_nothing(
    workshop: Workshop, mutate: Callable[[DraftFeed], DraftFeed | None]
) -> None:
    watched = Watched(workshop, off_until(PROMPT_LENGTH + 3), block_size=4)
    inner = watched.speculator.propose
    watched.speculator.propose = lambda inputs: inner(  # type: ignore[method-assign]
        replace(inputs, draft_feeds=[feed and mutate(feed) for feed in inputs.draft_feeds])
    )
    with pytest.raises(AssertionError, match=r"draft \d of Round"):
        watched.run([15])


# ---- in the scheduler --------------------------------------------------------------------------------------


class Periods(FixedDraftPolicy):
    """On and off by confirmed tokens."""

    def choose(self, request: Request, num_decoding: int) -> DraftChoice:
        choice = super().choose(request, num_decoding)
        return choice if len(request.token_ids) // 7 % 2 else choice._replace(k=0, reason="k_zero")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_drafter_that_is_always_on_is_fed_each_token_once(depth: int) -> None:
    harness = SchedulerHarness(k=3, depth=depth, fed_windows=(None, 3), max_prefill_chunk=5)
    harness.run(make_request("r", range(8, 20), max_tokens=30))
    assert all(entry.draft_feed is None for plan in harness.plans for entry in plan.scheduled)
    assert harness.device.num_fed <= 12 + 30


@pytest.mark.parametrize("windows", [(None,), (3,), (None, 5)])
@pytest.mark.parametrize("depth", [1, 2])
def test_periods_leave_no_hole_and_hold_no_blocks(depth: int, windows: tuple[int | None, ...]) -> None:
    """The fake device checks every key that the drafter reads."""
    harness = SchedulerHarness(
        k=3,
        depth=depth,
        fed_windows=windows,
        make_policy=Periods,
        max_prefill_chunk=3,
        num_blocks=256,
        num_right=lambda k: k // 2,
    )
    harness.run(*[make_request(f"r{index}", range(8, 12 + index), max_tokens=60) for index in range(4)])
    feeds = [entry.draft_feed for plan in harness.plans for entry in plan.scheduled if entry.draft_feed]
    assert len(feeds) > 10
    assert all(received.spec for received in harness.received.values())


def test_a_drafter_without_blocks_delays_nobody() -> None:
    """Two requests fill the target's pool; the drafter's has room for one of them."""
    plain = SchedulerHarness(k=3, num_blocks=[32], max_model_len=64)
    harness = SchedulerHarness(k=3, num_blocks=[32, 16], fed_windows=(None,), max_model_len=64)
    for each in (plain, harness):
        each.run(*[make_request(f"r{index}", [8 + index], max_tokens=60) for index in range(2)])
        assert each.scheduler.stats().num_preemptions_total == 0
    drafted = [len(received.spec) for received in harness.received.values()]
    assert all(drafted)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failure_sets_the_drafter_back_to_its_watermark(depth: int) -> None:
    turns = iter([False, False, True] + [False] * 100)
    harness = SchedulerHarness(
        k=2, depth=depth, fed_windows=(None, 5), num_right=lambda k: 0, drafter_fails=lambda: next(turns)
    )
    harness.run(make_request("r", range(8, 18), max_tokens=12))
    (feed,) = [entry.draft_feed for plan in harness.plans for entry in plan.scheduled if entry.draft_feed]
    assert feed.start == 11, "10 tokens of the prompt, 1 of the first decode; the second failed"
    assert harness.device.num_void_feeds == depth - 1
