"""Requests that leave method and k to the policy get the tokens of plain decoding, whoever drafts when; and what the
policy is told of methods that did not draft is what they would have brought.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from engine.request import Request
from engine.scheduler.draft_policy import DraftChoice
from engine.scheduler.replays import Replay
from tests.support.engine_harness import Harness
from tests.support.tiny_drafters import Workshop, shared_workshop

K = 5
OWN_KV = ("eagle", "draft_model")  # of each kind one: it keeps up, or it catches up


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("setting", ["greedy", "seeded"])
@pytest.mark.parametrize("own", OWN_KV)
def test_auto_changes_nothing(own: str, setting: str, depth: int, workshop: Workshop) -> None:
    methods = ("ngram", "suffix", own)
    core = workshop.core([workshop.drafter(method) for method in methods], depth=depth, max_prefill_chunk=7)
    used: set[str] = set()
    for _ in range(3):  # the policy learns on, by the real clock
        choices = [("auto", None), ("auto", 2), (own, 3), ("auto", None), ("none", None)]
        results = Harness(core).run(workshop.requests(setting, choices))
        for index, (name, result) in enumerate(results.items()):
            plain = workshop.plain(setting)[name]
            assert (result.token_ids, result.finish) == (plain.token_ids, plain.finish), name
            if choices[index % len(choices)][0] == "auto":
                used |= {item.method for item in result.spec}
    assert used


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("own", OWN_KV)
def test_methods_that_take_turns_change_nothing(own: str, depth: int, workshop: Workshop) -> None:
    methods = ("ngram", "suffix", own)
    core = workshop.core([workshop.drafter(method) for method in methods], depth=depth, max_prefill_chunk=7)
    policy: Any = core._scheduler._draft_policy  # type: ignore[attr-defined]
    turns = cycle([*methods, own])

    def choose(request: Request, num_decoding: int) -> DraftChoice:
        method = next(turns)
        return DraftChoice(method, len(request.token_ids) % 4)

    policy.choose = choose
    results = Harness(core).run(workshop.requests("greedy", [("auto", None)]))
    for name, result in results.items():
        assert result.token_ids == workshop.plain("greedy")[name].token_ids, name
    assert {item.method for result in results.values() for item in result.spec} == set(methods)


@pytest.mark.parametrize("setting", ["greedy", "seeded"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_replays_are_what_the_method_brings_when_it_drafts(
    method: str, setting: str, workshop: Workshop
) -> None:
    """One request after the other, since `suffix` learns from those that have ended."""
    fixed, auto = (workshop.core([workshop.drafter(method), workshop.drafter("eagle")]) for _ in range(2))
    scheduler: Any = auto._scheduler
    scheduler._replays._clock = lambda: 0.0  # there is time for all
    replayed: list[tuple[int, int]] = []

    def observe_replay(request: Request, replay: Replay) -> None:
        assert replay.method == method
        replayed.extend((one.num_drafted, one.num_accepted) for one in replay.outcomes)

    scheduler._draft_policy.observe_replay = observe_replay
    num_compared = 0
    for asked, left_open in zip(
        workshop.requests(setting, [(method, None)]),
        workshop.requests(setting, [("auto", None)]),
        strict=True,
    ):
        replayed.clear()
        brought = Harness(fixed).run([asked])[asked.request_id].spec
        Harness(auto).run([left_open])
        # For the last K tokens of the text fewer drafts are asked for.
        observed = [(one.num_drafted, one.num_verifier_accepted) for one in brought][:-K]
        assert [outcome for outcome in replayed if outcome[0] > 0][: len(observed)] == observed
        num_compared += len(observed)
    assert num_compared > 20
