"""Every draft of every round is drawn from the logits that the draft model gives by definition, over the whole
sequence at once: its KV cache has no holes, no rejected entries and no foreign ones, whatever happened before.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.messages import AddRequest
from engine.request import Request
from engine.scheduler.draft_policy import DraftChoice
from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from engine.spec_decode.speculator import DraftTokens, ProposalInputs
from tests.support.draft_rounds import RoundChecker, record_rounds
from tests.support.engine_harness import Harness, Result, request
from tests.support.tiny_drafters import Workshop, shared_workshop

METHODS = ("draft_model", "eagle", "eagle3")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Watched:
    """An engine with one draft model whose rounds are recorded."""

    def __init__(self, workshop: Workshop, method: str, **core: Any) -> None:
        self.speculator = workshop.draft_model(workshop.drafter(method))
        self.rounds = record_rounds(self.speculator)
        self.checker = RoundChecker(workshop, method)
        self.core: EngineCore = workshop.core(
            [workshop.drafter(method)], speculators={method: self.speculator}, **core
        )

    def run(self, requests: list[AddRequest]) -> dict[str, Result]:
        """Run and check; the rounds are those of this run."""
        self.rounds.clear()
        results = Harness(self.core).run(requests)
        self.checker.check(self.rounds)
        return results


def observations(results: dict[str, Result]) -> set[str]:
    """Which kinds of acceptance a run held."""
    kinds = set()
    for item in (item for result in results.values() for item in result.spec):
        is_full = item.num_verifier_accepted == item.num_drafted
        kinds.add("full" if is_full else "partial" if item.num_verifier_accepted else "zero")
    return kinds


@pytest.mark.parametrize(("depth", "block_size"), [(1, 16), (2, 1), (2, 16)])
@pytest.mark.parametrize("setting", ["greedy", "seeded"])
def test_after_prefill_and_every_kind_of_acceptance(
    workshop: Workshop, method: str, setting: str, depth: int, block_size: int
) -> None:
    watched = Watched(workshop, method, depth=depth, block_size=block_size)
    choices = [(method, 5), (method, 2), ("none", None), (method, 3), (method, 1)]
    results = watched.run(workshop.requests(setting, choices))
    assert observations(results) == {"full", "partial", "zero"}
    lengths = {len(prompt) for prompt in workshop.prompts}
    assert any(len(item.confirmed) - 1 in lengths for item in watched.rounds), (
        "no round right after a prefill"
    )


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 11, 12, 13])
def test_after_chunked_prefill_with_ends_at_every_offset(workshop: Workshop, method: str, chunk: int) -> None:
    """known-faults 25: the tail of a chunk is paired with the next prompt token."""
    watched = Watched(workshop, method, max_prefill_chunk=chunk)
    prompts = [workshop.prompts[index] for index in (4, 5, 6)]  # 12, 13, 14 tokens
    watched.run([request(f"r{i}", prompt, k=3, max_tokens=6) for i, prompt in enumerate(prompts)])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_after_a_prefix_hit(workshop: Workshop, method: str, block_size: int) -> None:
    """Of the whole prompt, and of a part of it that another request left behind."""
    watched = Watched(workshop, method, block_size=block_size)
    prompt = workshop.prompts[15]  # 40 tokens
    watched.run([request("first", prompt, k=3, max_tokens=12)])
    again = watched.run([request("again", prompt, k=3, max_tokens=12)])
    assert again["again"].num_cached_tokens > 0
    other = [*prompt[:35], 260, 261, 262]
    partly = watched.run(
        [request("other", other, k=4, max_tokens=12), request("longer", [*prompt, 265, 266], k=2)]
    )
    assert partly["other"].num_cached_tokens >= 35 // block_size * block_size - block_size
    assert partly["longer"].num_cached_tokens > 0


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_prefix_hit_on_what_other_methods_computed(
    workshop: Workshop, method: str, chunk: int | None
) -> None:
    """A request without the drafter leaves target KV behind, but no drafter KV: a drafter that can catch up does, for
    one that cannot the hit is not taken.
    """
    watched = Watched(workshop, method, block_size=4, max_prefill_chunk=chunk)
    prompt = workshop.prompts[15]
    Harness(watched.core).run([request("plain", prompt, method="none")])
    result = watched.run([request("drafted", prompt, k=3)])["drafted"]
    catches_up = watched.speculator.needs.catch_up == "tokens"
    assert result.num_cached_tokens == (36 if catches_up else 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_after_preemption(workshop: Workshop, method: str, depth: int) -> None:
    """known-faults 25: a resumed request prefills prompt and output."""
    watched = Watched(workshop, method, depth=depth, block_size=4, num_blocks=36, max_prefill_chunk=7)
    results = watched.run(workshop.requests("greedy", [(method, 3), (method, 5)]))
    assert any(result.num_preemptions for result in results.values())


@pytest.mark.parametrize("depth", [1, 2])
def test_after_periods_without_drafts(workshop: Workshop, method: str, depth: int) -> None:
    """known-faults 24: k goes 3, 0, 3, 0: the drafter keeps up, and its acceptance is there at once."""
    watched = Watched(workshop, method, depth=depth, block_size=4)
    policy: Any = watched.core._scheduler._draft_policy
    inner, turns = policy.choose, count()

    def choose(request: Request, num_decoding: int) -> DraftChoice:
        choice: DraftChoice = inner(request, num_decoding)
        return choice._replace(k=3 if next(turns) // 24 % 2 == 0 else 0)

    policy.choose = choose
    results = watched.run(workshop.requests("greedy", [(method, 3)]))
    gaps = 0
    for prompt, result in zip(workshop.prompts, results.values(), strict=True):
        gaps += len(result.token_ids) - 1 - sum(item.num_emitted for item in result.spec)
        assert result.token_ids == workshop.plain("greedy")[f"r{workshop.prompts.index(prompt)}"].token_ids
    assert gaps > 100, "hardly a step went without drafts"
    assert observations(results) == {"full", "partial", "zero"}


def test_after_nothing_but_rejections(workshop: Workshop, method: str) -> None:
    """known-faults 18, 45: no key of a rejected draft is attended to; nothing accepted is no special case."""
    watched = Watched(workshop, method, depth=2)
    always_wrong(watched.speculator, workshop)
    results = watched.run(workshop.requests("greedy", [(method, 5), (method, 1), (method, 3)]))
    for request_id, result in results.items():
        assert result.token_ids == workshop.plain("greedy")[request_id].token_ids
        assert all(item.num_verifier_accepted == 0 for item in result.spec)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_always_wrong_drafter_of_one_token_changes_nothing(
    workshop: Workshop, method: str, depth: int
) -> None:
    """known-faults 32: a rejection takes effect in the same step."""
    watched = Watched(workshop, method, depth=depth)
    always_wrong(watched.speculator, workshop)
    results = watched.run(workshop.requests("seeded", [(method, 1)]))
    for request_id, result in results.items():
        assert result.token_ids == workshop.plain("seeded")[request_id].token_ids
        assert len(result.spec) >= len(result.token_ids) - 2


def always_wrong(speculator: AutoRegressiveSpeculator, workshop: Workshop) -> None:
    """Replace what is proposed, not what was drafted, by a token that the target hardly ever draws."""
    inner = speculator.propose

    def propose(inputs: ProposalInputs) -> DraftTokens:
        drafts = inner(inputs)
        return replace(drafts, token_ids=torch.full_like(drafts.token_ids, 5))

    speculator.propose = propose  # type: ignore[method-assign]
