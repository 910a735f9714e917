"""Every draft of an assistant is the argmax of what it computes by definition over the target's whole sequence: at
every position, under both position policies, whatever was before (chunks, prefix hits, preemption, rejections, pauses).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import count, product
from typing import Any

import pytest
import torch

from engine.config import SpeculatorConfig
from engine.core import EngineCore
from engine.messages import AddRequest
from engine.request import Request
from engine.scheduler.draft_policy import DraftChoice
from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from engine.spec_decode.speculator import DraftTokens, ProposalInputs
from tests.support.engine_harness import Harness, Result, request
from tests.support.gemma4_reference import POLICIES, AssistantReference, Gemma4Reference
from tests.support.gemma4_rounds import AssistantChecker, record_assistant_rounds
from tests.support.tiny_drafters import Workshop, families_of, shared_workshop
from tests.support.tiny_gemma4 import WINDOW

METHOD = "gemma4_mtp"
MAX_K = 6


Case = tuple[str, str]  # target family, position policy
CASES: list[Case] = list(product(families_of(METHOD), POLICIES))
CROSSED: list[Case] = list(
    zip(families_of(METHOD), POLICIES, strict=True)
)  # each family and each policy once
crossed = pytest.mark.parametrize("case", CROSSED, indirect=True, ids="-".join)


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    given: Case = request.param
    return given


@pytest.fixture
def workshop(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory, case[0])


@pytest.fixture
def policy(case: Case) -> str:
    return case[1]


@cache
def make_assistant(workshop: Workshop) -> AssistantReference:
    workshop.drafter(METHOD)
    return AssistantReference.load(workshop.folder / METHOD, Gemma4Reference.load(workshop.target_path))


@cache
def make_checker(workshop: Workshop, policy: str) -> AssistantChecker:
    """One for all tests: they run the same texts."""
    return AssistantChecker(make_assistant(workshop), POLICIES[policy])


class Watched:
    """An engine with an assistant whose rounds are recorded."""

    def __init__(self, workshop: Workshop, policy: str, **core: Any) -> None:
        config = SpeculatorConfig(
            method=METHOD, model=workshop.drafter(METHOD).model, k=MAX_K, options={"positions": policy}
        )
        self.speculator = workshop.draft_model(config)
        self.rounds = record_assistant_rounds(self.speculator)
        self.checker = make_checker(workshop, policy)
        self.core: EngineCore = workshop.core([config], speculators={METHOD: self.speculator}, **core)

    def run(self, requests: list[AddRequest], *, is_greedy: bool = True) -> dict[str, Result]:
        """Run and check; the rounds are those of this run."""
        self.rounds.clear()
        results = Harness(self.core).run(requests)
        self.checker.check(self.rounds, is_greedy=is_greedy)
        return results


def observations(results: dict[str, Result]) -> set[str]:
    """Which kinds of acceptance a run held."""
    kinds = set()
    for item in (item for result in results.values() for item in result.spec):
        is_full = item.num_verifier_accepted == item.num_drafted
        kinds.add("full" if is_full else "partial" if item.num_verifier_accepted else "zero")
    return kinds


def check_plain(workshop: Workshop, results: dict[str, Result], setting: str = "greedy") -> None:
    for request_id, result in results.items():
        assert result.token_ids == workshop.plain(setting)[request_id].token_ids


def always_wrong(speculator: AutoRegressiveSpeculator) -> None:
    """Replace what is proposed, not what was drafted, by a token that the target hardly ever draws."""
    inner = speculator.propose

    def propose(inputs: ProposalInputs) -> DraftTokens:
        drafts = inner(inputs)
        return replace(drafts, token_ids=torch.full_like(drafts.token_ids, 5))

    speculator.propose = propose  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("case", "chunk", "block_size", "depth"),
    [
        *((case, 7, 1, 2) for case in CASES),
        *((case, 1, 16, 1) for case in CROSSED),
        *((case, 64, 16, 2) for case in CROSSED),
    ],
    indirect=["case"],
)
def test_a_batch_of_mixed_lengths_after_every_kind_of_acceptance(
    workshop: Workshop, policy: str, chunk: int, block_size: int, depth: int
) -> None:
    """16 requests, k = 0..6, prompts of 1 to 5 windows; several end while others go on."""
    watched = Watched(workshop, policy, depth=depth, block_size=block_size, max_prefill_chunk=chunk)
    choices = [(METHOD, k) for k in (5, 2, 0, 3, 6, 1, 4)]
    results = watched.run(workshop.requests("greedy", [*choices, ("none", None)]))
    check_plain(workshop, results)
    assert observations(results) == {"full", "partial", "zero"}
    lengths = {len(prompt) + 1 for prompt in workshop.prompts}
    assert any(len(item.confirmed) in lengths for item in watched.rounds), "no round right after a prefill"
    assert {len(item.drafts) for item in watched.rounds} == set(range(1, MAX_K + 1))
    assert max(lengths) > 5 * WINDOW


def test_at_every_position_after_nothing_but_rejections(workshop: Workshop, policy: str) -> None:
    """Nothing is ever accepted, so there is a round at each position; each is that of a fresh run of its prefix."""
    watched = Watched(workshop, policy, depth=2, block_size=1)
    always_wrong(watched.speculator)
    results = watched.run(workshop.requests("greedy", [(METHOD, MAX_K), (METHOD, 3)]))
    check_plain(workshop, results)
    assert observations(results) == {"zero"}
    seen = {item.confirmed for item in watched.rounds}
    for prompt, result in zip(workshop.prompts, results.values(), strict=True):
        tokens = (*prompt, *result.token_ids)
        # The last one has no draft after it, and before the one before it a draft would have no room.
        assert all(tokens[:end] in seen for end in range(len(prompt) + 1, len(tokens) - 1))
    fresh = Watched(workshop, policy, block_size=16)
    sample = watched.rounds[::17]
    fresh.run([request(f"r{i}", item.confirmed[:-1], k=MAX_K, max_tokens=8) for i, item in enumerate(sample)])
    logits = {item.confirmed: torch.stack(item.logits) for item in fresh.rounds}
    for item in sample:
        got = torch.stack(item.logits)
        assert torch.allclose(got, logits[item.confirmed][: len(got)], rtol=0.0, atol=1e-8)


def test_after_the_prefill_of_every_prefix(workshop: Workshop, policy: str) -> None:
    """Prompts of 1 to 40 tokens: five windows, every offset in blocks and chunks."""
    watched = Watched(workshop, policy, block_size=4, max_prefill_chunk=7)
    prompt = workshop.prompts[15]
    requests = [request(f"r{end}", prompt[:end], k=3, max_tokens=5, ignore_eos=True) for end in range(1, 41)]
    watched.run(requests)
    assert {len(item.confirmed) for item in watched.rounds} >= set(range(2, 42))


@crossed
def test_seeded_drafts_have_the_same_logits(workshop: Workshop, policy: str) -> None:
    watched = Watched(workshop, policy, depth=2)
    results = watched.run(workshop.requests("seeded", [(METHOD, 4)]), is_greedy=False)
    check_plain(workshop, results, "seeded")
    assert observations(results) == {"full", "partial", "zero"}


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_after_prefix_hits(workshop: Workshop, policy: str, block_size: int) -> None:
    """Of a whole prompt, also one that was computed without drafts, and into the middle of a longer sequence."""
    watched = Watched(workshop, policy, block_size=block_size)
    prompt = workshop.prompts[15]  # 40 tokens
    Harness(watched.core).run([request("plain", prompt, method="none", max_tokens=12, ignore_eos=True)])
    again = watched.run([request("again", prompt, k=3, max_tokens=12)])
    assert again["again"].num_cached_tokens == (len(prompt) - 1) // block_size * block_size
    partly = watched.run(
        [
            request("other", [*prompt[:20], 260, 261, 262], k=4, max_tokens=12),
            request("longer", [*prompt, 265, 266], k=2),
        ]
    )
    assert partly["other"].num_cached_tokens == 20 // block_size * block_size
    assert partly["longer"].num_cached_tokens >= 40 // block_size * block_size


@crossed
def test_after_preemption(workshop: Workshop, policy: str) -> None:
    watched = Watched(workshop, policy, depth=2, block_size=4, num_blocks=36, max_prefill_chunk=7)
    results = watched.run(workshop.requests("greedy", [(METHOD, 3), (METHOD, 5)]))
    check_plain(workshop, results)
    assert any(result.num_preemptions for result in results.values())


@crossed
def test_after_periods_without_drafts(workshop: Workshop, policy: str) -> None:
    """k goes 4, 0, 4, 0: nothing has to be caught up with."""
    watched = Watched(workshop, policy, depth=2, block_size=4)
    draft_policy: Any = watched.core._scheduler._draft_policy
    inner, turns = draft_policy.choose, count()

    def choose(request: Request, num_decoding: int) -> DraftChoice:
        choice: DraftChoice = inner(request, num_decoding)
        return choice._replace(k=4 if next(turns) // 24 % 2 == 0 else 0)

    draft_policy.choose = choose
    results = watched.run(workshop.requests("greedy", [(METHOD, 4)]))
    check_plain(workshop, results)
    gaps = sum(
        len(result.token_ids) - 1 - sum(item.num_emitted for item in result.spec)
        for result in results.values()
    )
    assert gaps > 50, "hardly a step went without drafts"


@crossed
def test_every_draft_step_is_one_row_per_request(workshop: Workshop, policy: str) -> None:
    """Also after long prefills and steps without drafts; and all steps of a round stand at one position."""
    watched = Watched(workshop, policy, max_prefill_chunk=7)
    speculator: Any = watched.speculator
    inner, calls = speculator.draft_forward, []

    def draft_forward(input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> Any:
        calls.append((len(input_ids), *positions.tolist()))
        return inner(input_ids, positions, *rest)

    speculator.draft_forward = draft_forward
    prompt = workshop.prompts[15]
    watched.run([request("r", prompt, k=MAX_K, max_tokens=12, ignore_eos=True)])
    steps = Counter(calls)
    assert {num_rows for num_rows, _ in steps} == {1}
    assert calls[0] == (1, len(prompt) - 1), "drafts before the prompt was computed"
    # A step in which the request wants no draft any more stands at 0.
    assert min(position for _, position in steps if position > 0) == len(prompt) - 1
    for item in watched.rounds:
        assert steps[1, len(item.confirmed) - 2] >= len(item.drafts)


@crossed
def test_what_a_round_shares_is_made_once_and_nothing_is_fed_back_after_its_last_draft(
    workshop: Workshop, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(workshop, policy)
    speculator: Any = watched.speculator
    model = speculator._model
    counts: Counter[str] = Counter()

    def count_calls(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def counted(*args: Any) -> Any:
            counts[name] += 1
            return inner(*args)

        monkeypatch.setattr(owner, name, counted)

    count_calls(speculator, "propose")
    for name in ("rotations", "forward", "feed_back"):
        count_calls(model, name)
    watched.run([request("r", workshop.prompts[3], k=MAX_K, max_tokens=20, ignore_eos=True)])
    rounds = counts["rotations"]
    assert 1 < rounds <= counts["propose"]
    assert counts["feed_back"] == counts["forward"] - rounds
    assert counts["forward"] > 2 * rounds
