"""What lookup methods would have drafted: the same as they do draft, and what would have come of it, within the time
that there is.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from engine.kernels.ngram_lookup import ngram_lookup_reference
from engine.request import Request
from engine.scheduler.draft_policy import FixedDraftPolicy
from engine.scheduler.replays import MAX_DELAY, READ_CHUNK, SHARE, Replayed, Replays
from engine.spec_decode.host import RequestView
from engine.spec_decode.ngram_replay import NgramReplay
from engine.spec_decode.replay import LookupReplay
from engine.spec_decode.suffix import MAX_OWN_TOKENS, SuffixSpeculator
from tests.support.scheduler_harness import make_policy_request

K = 4


class PeriodReplay(LookupReplay):
    """Drafts what stood `period` tokens before; at every fifth position nothing."""

    def __init__(self, period: int = 3) -> None:
        self.token_ids: list[int] = []
        self._period = period

    def read(self, token_ids: Sequence[int]) -> None:
        assert len(token_ids) <= READ_CHUNK
        self.token_ids += token_ids

    def propose(self, max_drafts: int) -> list[int]:
        if len(self.token_ids) % 5 == 0:
            return []
        return self.token_ids[-self._period :][:max_drafts]


def request_of(name: str = "a") -> Request:
    """Its prompt is one token long."""
    return make_policy_request(FixedDraftPolicy([]), name)


def endless(start: Mapping[str, Callable[[str], LookupReplay]]) -> Replays:
    """There is time for all."""
    replays = Replays(start, clock=lambda: 0.0)
    replays.grant(1.0)
    return replays


def text(length: int, seed: int = 0) -> list[int]:
    """Full of repetitions, and of ends of these."""
    generator = random.Random(seed)
    token_ids: list[int] = []
    while len(token_ids) < length:
        token_ids += generator.choices(range(3), k=3) * generator.randrange(1, 5)
    return token_ids[:length]


def decode(propose: Callable[[list[int]], list[int]], token_ids: list[int], first: int) -> list[Replayed]:
    """What decoding with one method alone brings, by definition. The last verification is left out: it may be cut."""
    outcomes = []
    position, run, run_before = first, 0, 0
    while position + K < len(token_ids):
        drafts = propose(token_ids[:position])
        num_right = next(
            (index for index, draft in enumerate(drafts) if draft != token_ids[position + index]), len(drafts)
        )
        outcomes.append(Replayed(K, len(drafts), num_right, run_before))
        run_before, run = run, run + num_right if drafts and num_right == len(drafts) else 0
        position += num_right + 1
    return outcomes


def by_period(token_ids: list[int]) -> list[int]:
    replay = PeriodReplay()
    replay.token_ids = token_ids
    return replay.propose(K)


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_is_what_decoding_with_the_method_alone_brings(seed: int) -> None:
    """However the tokens came."""
    request, output = request_of(), text(300, seed)
    replays = endless({"period": lambda salt: PeriodReplay()})
    replays.follow(request, {"period": K})
    generator = random.Random(seed)
    outcomes: list[Replayed] = []
    while output:
        num_new = generator.randrange(1, 7)
        request.token_ids += output[:num_new]
        del output[:num_new]
        for _, replay in replays.run([request]):
            outcomes += replay.outcomes
    expected = decode(by_period, request.token_ids, first=2)
    assert outcomes[: len(expected)] == expected
    assert {outcome.num_accepted for outcome in outcomes} >= {0, 1, 3}
    assert {outcome.run_before for outcome in outcomes} >= {0, 3, 6}


def test_the_run_counts_drafts_that_are_right_so_far() -> None:
    request = request_of()
    replays = endless({"period": lambda salt: PeriodReplay()})
    replays.follow(request, {"period": K})
    runs = []
    for token_id in [1, 2, 3, 1, 2, 3, 1, 9, 9]:  # behind the prompt's 8
        request.token_ids.append(token_id)
        runs += [replay.run for _, replay in replays.run([request])]
    assert runs == [0, 0, 0, 1, 2, 3, 3, 0, 0]


def test_of_requests_and_methods_that_are_not_wanted_nothing_is_kept() -> None:
    one, other = request_of("one"), request_of("other")
    replays = endless({"period": lambda salt: PeriodReplay()})
    replays.follow(one, {"period": K})
    replays.follow(other, {"period": 0})
    for request in (one, other):
        request.token_ids += text(10)
    assert {request for request, _ in replays.run([one, other])} == {one}
    replays.forget(one)
    replays.forget(other)
    assert replays.run([one, other]) == []
    assert not replays._walks
    assert not replays._waiting


def test_replays_take_a_share_of_the_time_and_the_rest_waits_its_turn() -> None:
    """Each lookup takes a millisecond."""
    now = 0.0

    class Slow(PeriodReplay):
        def propose(self, max_drafts: int) -> list[int]:
            nonlocal now
            now += 0.001
            return super().propose(max_drafts)

    replays = Replays({"period": lambda salt: Slow()}, clock=lambda: now)
    requests = [request_of(f"r{index}") for index in range(4)]
    for request in requests:
        replays.follow(request, {"period": K})
        request.token_ids += text(100)
    outcomes: dict[str, list[Replayed]] = {}
    granted, waiting = 0.0, requests
    for _ in range(1000):
        replays.grant(0.1)
        granted += SHARE * 0.1
        for request, replay in replays.run(waiting):
            outcomes.setdefault(request.request_id, []).extend(replay.outcomes)
        assert now <= granted + 0.001
        waiting = []
    assert list(outcomes) == ["r0", "r1", "r2", "r3"], "the oldest first"
    expected = decode(by_period, requests[0].token_ids, first=2)
    assert all(outcomes[name][: len(expected)] == expected for name in outcomes)
    for _ in range(100):  # what is not used is saved up, to a limit
        replays.grant(0.1)
    requests[0].token_ids += text(100)
    before = now
    replays.run(requests)
    assert now - before == pytest.approx(MAX_DELAY * 0.1, abs=0.0011)


def test_a_replay_that_raises_ends_for_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(PeriodReplay):
        def propose(self, max_drafts: int) -> list[int]:
            raise RuntimeError("broken")

    replays = endless({"broken": lambda salt: Broken(), "period": lambda salt: PeriodReplay()})
    requests = [request_of("one"), request_of("other")]
    for request in requests:
        replays.follow(request, {"broken": K, "period": K})
        request.token_ids += text(20)
    with caplog.at_level(logging.ERROR):
        news = replays.run(requests)
    assert [(request.request_id, replay.method) for request, replay in news] == [
        ("one", "period"),
        ("other", "period"),
    ]
    assert replays.num_failures == {("broken", "RuntimeError"): 2}
    assert len(caplog.records) == 1
    requests[0].token_ids += text(20)
    assert [replay.method for _, replay in replays.run(requests)] == ["period", "period"]


# ---- the methods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_prompt_lookup_on_the_host_is_that_of_the_device(min_n: int, max_n: int) -> None:
    token_ids = text(150, seed=min_n)
    history = torch.tensor([token_ids], dtype=torch.int32)
    replay = NgramReplay(min_n, max_n)
    num_found = 0
    for length in range(1, len(token_ids) + 1):
        replay.read(token_ids[length - 1 : length])
        expected, found = ngram_lookup_reference(
            history,
            torch.tensor([0]),
            torch.tensor([length]),
            max_len=len(token_ids),
            k=5,
            min_n=min_n,
            max_n=max_n,
        )
        assert replay.propose(5) == (expected[0].tolist() if found else [])
        num_found += bool(found)
    assert 20 < num_found < len(token_ids)


def view(token_ids: list[int], name: str, salt: str) -> RequestView:
    return RequestView(
        request_id=name, token_ids=token_ids, num_prompt_tokens=1, cache_salt=salt, max_drafts=5
    )


def test_a_replay_of_suffix_decoding_drafts_what_it_drafts_and_knows_what_it_has_learnt() -> None:
    suffix = SuffixSpeculator(2, 24, 0.1, 1000)
    replay, stranger = suffix.replay("tenant"), suffix.replay("other")
    suffix.finish(view([0, 11, 12, 13, 14], "past", "tenant"))
    token_ids = [*text(60), 11, 12, 13]
    for length in range(1, len(token_ids) + 1):
        for one in (replay, stranger):
            one.read(token_ids[length - 1 : length])
        assert replay.propose(5) == suffix.propose(view(token_ids[:length], "live", "tenant"))
        assert stranger.propose(5) == suffix.propose(view(token_ids[:length], "foreign", "other"))
    assert replay.propose(5) == [14]
    assert stranger.propose(5) == []


def test_of_a_long_prompt_the_newest_tokens_are_read() -> None:
    request = request_of()
    num_tokens = MAX_OWN_TOKENS + 100
    request.message.prompt_token_ids[:] = request.token_ids[:] = range(num_tokens)
    seen: list[PeriodReplay] = []

    class Bounded(PeriodReplay):
        max_prompt_tokens = MAX_OWN_TOKENS

    def start(salt: str) -> LookupReplay:
        seen.append(Bounded())
        return seen[-1]

    replays = endless({"period": start})
    replays.follow(request, {"period": K})
    request.token_ids += [1, 2]
    replays.run([request])
    assert seen[0].token_ids[0] == 100
