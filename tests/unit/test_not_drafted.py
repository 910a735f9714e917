"""Every decoding request without drafts is counted, with the reason; and drafts made on the host."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from engine.spec_decode.host import HostSpeculator, RequestView
from tests.support.fake_device import VOCAB_SIZE
from tests.support.scheduler_harness import SchedulerHarness, make_request
from tests.support.scripted_host import ScriptedHost


class StatsHarness(SchedulerHarness):
    """Sums up the step stats."""

    def count(self) -> Counter[str]:
        """Reasons over all steps; runs to the end, and checks that each decode is counted or verified drafts."""
        reasons: Counter[str] = Counter()
        self.num_not_overlapped = self.num_preempted = 0
        while self.scheduler.has_unfinished or self.in_flight:
            self.step()
            stats = self.scheduler.step_stats()
            reasons.update(stats.not_drafted)
            self.num_not_overlapped += stats.num_not_overlapped
            self.num_preempted += stats.num_preempted
        self.check_idle()
        return reasons

    @property
    def num_verifications(self) -> int:
        return sum(len(received.spec) for received in self.received.values())


class NothingFound(HostSpeculator):
    def propose(self, view: RequestView) -> list[int]:
        return []

    def finish(self, view: RequestView) -> None:
        pass


class Broken(HostSpeculator):
    def propose(self, view: RequestView) -> list[int]:
        raise RuntimeError("the drafter is broken")

    def finish(self, view: RequestView) -> None:
        raise RuntimeError("the drafter is broken")


class OutOfVocabulary(NothingFound):
    def propose(self, view: RequestView) -> list[int]:
        return [VOCAB_SIZE]


def test_a_server_without_methods_and_a_request_without_wish_are_disabled() -> None:
    harness = StatsHarness()
    harness.add(make_request("a", [8], max_tokens=5))
    assert harness.count() == {"disabled": 4}
    harness = StatsHarness(k=2)
    harness.add(
        make_request("a", [8], max_tokens=5, method="none"), make_request("b", [9], max_tokens=5, k=0)
    )
    assert harness.count() == {"disabled": 8}


def test_the_last_token_has_no_room_for_a_draft() -> None:
    harness = StatsHarness(k=3, num_right=lambda k: 0)
    harness.add(make_request("a", [8], max_tokens=6))
    assert harness.count() == {"limit": 1}
    assert harness.num_verifications == 4


def test_a_full_budget_is_a_limit() -> None:
    harness = StatsHarness(k=3, num_right=lambda k: 0, max_num_batched_tokens=2)
    harness.add(make_request("a", [8], max_tokens=6), make_request("b", [9], max_tokens=6))
    assert harness.count()["limit"] >= 6


def test_a_drafter_with_a_shorter_context_stops_for_that_request_only() -> None:
    """Known fault 11."""
    harness = StatsHarness(k=2, drafter_context=12, num_right=lambda k: 0)
    harness.add(make_request("short", [8, 9], max_tokens=6), make_request("long", range(8, 20), max_tokens=6))
    reasons = harness.count()
    assert reasons["drafter_limit"] == 5
    assert len(harness.received["short"].spec) == 4
    assert harness.received["long"].spec == []
    for plan in harness.plans:
        for entry in plan.scheduled:
            if entry.method != "none":
                assert entry.max_seq_len + entry.num_next_drafts <= 12


@pytest.mark.parametrize(
    ("host", "reason"),
    [(NothingFound(), "no_match"), (Broken(), "drafter_error"), (OutOfVocabulary(), "drafter_error")],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_host_method_that_brings_nothing_or_fails_costs_drafts_only(
    host: HostSpeculator, reason: str, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    harness = StatsHarness(k=2, host=host, depth=depth)
    harness.add(make_request("a", [8], max_tokens=8), make_request("b", [9], max_tokens=8, method="none"))
    reasons = harness.count()
    assert reasons[reason] == 6
    assert set(reasons) == {reason, "limit", "disabled"}
    failures = [record for record in caplog.records if "failed" in record.message]
    assert len(failures) <= 1, "one line per kind of exception"
    assert bool(failures) == (reason == "drafter_error")


@pytest.mark.parametrize("depth", [1, 2])
def test_host_drafts_are_verified_in_the_next_step_and_such_steps_do_not_overlap(depth: int) -> None:
    host = ScriptedHost()
    harness = StatsHarness(k=3, host=host, depth=depth)
    harness.add(make_request("a", [8], max_tokens=21), make_request("b", [9], max_tokens=21, method="none"))
    harness.count()
    assert [observation.num_emitted for observation in harness.received["a"].spec] == [4] * 5
    assert {observation.method for observation in harness.received["a"].spec} == {"scripted"}
    assert host.num_proposals == 5
    # The chunk and all verifications: the last one might have brought a single token, and asks for more too.
    assert harness.num_not_overlapped == (6 if depth == 2 else 0)
    rows = [[entry.row for entry in plan.scheduled] for plan in harness.plans]
    if depth == 2:
        assert any(0 in first and 0 not in second for first, second in pairwise(rows))


def test_host_methods_learn_from_every_request_that_ends() -> None:
    host = ScriptedHost()
    harness = StatsHarness(k=2, host=host, max_num_seqs=2)
    names = ["a", "b", "c", "d"]
    harness.add(
        *[
            make_request(name, [8 + i], max_tokens=6, method=None if i % 2 else "none")
            for i, name in enumerate(names)
        ]
    )
    harness.step()
    harness.abort("d")
    harness.count()
    assert sorted(name for name, _ in host.finished) == names
    for name, output in host.finished:
        assert output == harness.received[name].token_ids
    assert host.live == set()


def test_a_row_without_match_falls_back_to_one_row_after_one_step_and_probes_again() -> None:
    turns = iter([3, 3, 0, 0, 0, 3, 3, 3, 3, 3, 3])
    harness = StatsHarness(k=3, num_found=lambda k: min(next(turns, 3), k))
    harness.add(make_request("a", [8], max_tokens=30))
    harness.count()
    decodes = [entry for plan in harness.plans for entry in plan.scheduled if not entry.is_prefill]
    assert [entry.num_drafts for entry in decodes[:7]] == [3, 3, 0, 0, 0, 3, 3]
    assert all(entry.num_next_drafts == 3 for entry in decodes[:6])


def test_with_two_steps_in_flight_a_miss_is_known_one_step_later() -> None:
    harness = StatsHarness(k=3, depth=2, num_found=lambda k: 0)
    harness.add(make_request("a", [8], max_tokens=30))
    assert harness.count()["no_match"] > 25
    decodes = [entry.num_drafts for plan in harness.plans for entry in plan.scheduled if not entry.is_prefill]
    assert decodes[0] == 3
    assert set(decodes[1:]) == {0}


def test_preemptions_are_counted_with_the_step_that_made_them() -> None:
    harness = StatsHarness(block_size=4, num_blocks=8)
    harness.add(*[make_request(name, [8, 9, 10, index], max_tokens=20) for index, name in enumerate("abc")])
    harness.count()
    assert harness.num_preempted == harness.scheduler.stats().num_preemptions_total > 0


def test_load_is_that_of_the_fullest_group() -> None:
    harness = SchedulerHarness(num_groups=2, k=2, has_drafter=True, num_blocks=16)
    harness.add(make_request("a", range(8, 18), method="none"))
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_blocks, stats.num_used_blocks) == (16, 3)
    assert stats.kv_cache_usage == pytest.approx(3 / 16)
    harness.run()
