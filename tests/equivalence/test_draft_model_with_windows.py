"""A draft model whose layers differ: full and sliding ones, in KV groups of its own beside the target's. Texts are
longer than the window.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from engine.config import SpeculatorConfig
from engine.messages import AddRequest
from engine.request import Request
from engine.scheduler.draft_policy import DraftChoice
from tests.support.engine_harness import Harness, Result
from tests.support.tiny_drafters import MAX_MODEL_LEN, MAX_TOKENS, Workshop, shared_workshop
from tests.support.tiny_models import TINY_WINDOW

METHOD = "draft_model"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory, "gemma3")


def exact_drafter(workshop: Workshop) -> SpeculatorConfig:
    """The target drafts for itself."""
    return SpeculatorConfig(method=METHOD, model=str(workshop.target_path), k=5)


def check_text(workshop: Workshop, setting: str, results: dict[str, Result]) -> None:
    for request_id, result in results.items():
        plain = workshop.plain(setting)[request_id]
        assert (result.token_ids, result.finish) == (plain.token_ids, plain.finish), request_id
    assert max(len(prompt) for prompt in workshop.prompts) > 3 * TINY_WINDOW


def check_all_accepted(requests: list[AddRequest], results: dict[str, Result]) -> None:
    """Wherever the request has room for k drafts, and until it ends: k + 1 tokens a verification."""
    for item in requests:
        result, k = results[item.request_id], item.speculation.num_speculative_tokens
        limit = min(len(item.prompt_token_ids) + MAX_TOKENS, MAX_MODEL_LEN)
        num_tokens = len(item.prompt_token_ids) + 1
        assert result.spec or len(result.token_ids) <= 2
        for seen in result.spec:
            room = limit - num_tokens - 1  # one token of a verification is the target's own
            assert seen.num_verifier_accepted >= min(seen.num_drafted, room), f"{item.request_id}: {seen}"
            is_end = num_tokens + seen.num_emitted == len(item.prompt_token_ids) + len(result.token_ids)
            assert is_end or seen.num_emitted == seen.num_drafted + 1
            assert is_end or room < 5 or seen.num_drafted == k
            num_tokens += seen.num_emitted


def check_none_rejected(results: dict[str, Result]) -> None:
    """But for what a request had no room for."""
    for item in (item for result in results.values() for item in result.spec):
        is_cut = item.num_emitted <= item.num_verifier_accepted
        assert is_cut or item.num_verifier_accepted == item.num_drafted


def test_its_groups_have_names_of_their_own(workshop: Workshop) -> None:
    groups = workshop.core([exact_drafter(workshop)]).model_info.kv_groups
    assert [group.name for group in groups] == ["full", "sliding", "draft_model.full", "draft_model.sliding"]
    assert [group.window for group in groups] == [None, TINY_WINDOW] * 2


@pytest.mark.parametrize(("depth", "block_size"), [(1, 16), (1, 1), (2, 4)])
@pytest.mark.parametrize("setting", ["greedy", "seeded", "penalties"])
def test_of_a_drafter_that_is_the_target_every_draft_is_accepted(
    workshop: Workshop, setting: str, depth: int, block_size: int
) -> None:
    core = workshop.core([exact_drafter(workshop)], depth=depth, block_size=block_size, max_prefill_chunk=7)
    requests = workshop.requests(setting, [(METHOD, k) for k in (5, 1, 3, 2, 4)])
    results = Harness(core).run(requests)
    check_text(workshop, setting, results)
    check_all_accepted(requests, results)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_draft_is_accepted_after_prefix_hits(workshop: Workshop, depth: int) -> None:
    core = workshop.core([exact_drafter(workshop)], depth=depth, block_size=4)
    requests = workshop.requests("greedy", [(METHOD, 3)])
    Harness(core).run(requests)
    results = Harness(core).run(requests)
    check_text(workshop, "greedy", results)
    check_all_accepted(requests, results)
    assert results["r15"].num_cached_tokens == 36  # of 40


@pytest.mark.parametrize("depth", [1, 2])
def test_every_draft_is_accepted_after_preemption(workshop: Workshop, depth: int) -> None:
    core = workshop.core(
        [exact_drafter(workshop)], depth=depth, block_size=4, num_blocks=36, max_prefill_chunk=7
    )
    requests = workshop.requests("seeded", [(METHOD, 3)])
    results = Harness(core).run(requests)
    check_text(workshop, "seeded", results)
    assert any(result.num_preemptions for result in results.values())
    check_none_rejected(results)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_draft_is_accepted_after_periods_without_drafts(workshop: Workshop, depth: int) -> None:
    core = workshop.core([exact_drafter(workshop)], depth=depth, block_size=4)
    policy: Any = core._scheduler._draft_policy  # type: ignore[attr-defined]
    inner, turns = policy.choose, count()

    def choose(request: Request, num_decoding: int) -> DraftChoice:
        choice: DraftChoice = inner(request, num_decoding)
        return choice if next(turns) // 50 % 2 == 0 else choice._replace(k=0)

    policy.choose = choose
    requests = workshop.requests("greedy", [(METHOD, 2)])
    results = Harness(core).run(requests)
    check_text(workshop, "greedy", results)
    assert next(turns) > 150
    check_none_rejected(results)
