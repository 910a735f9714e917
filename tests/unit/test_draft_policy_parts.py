"""What the adaptive policy is made of: the table of costs, the averages of acceptance, the turns of probes."""

from __future__ import annotations

import pytest

from engine.scheduler.acceptance import (
    MethodAcceptance,
    RequestAcceptance,
    expected_accepted,
    expected_drafted,
)
from engine.scheduler.probes import MethodProbe
from engine.scheduler.step_costs import CostTable, StepCosts


def observe(table: CostTable, x: float, seconds: float, times: int, method: str = "none") -> None:
    for _ in range(times):
        table.observe(method, x, seconds)


def test_a_cost_is_what_was_measured_and_in_between_on_the_line() -> None:
    """A second row costs half a step, those behind it hardly anything."""
    table = CostTable(elasticity=0.2)
    for _ in range(50):
        for x, seconds in ((1, 1.0), (2, 1.5), (6, 1.7)):
            table.observe("none", x, seconds)
    assert [table.predict("none", x) for x in (1, 1.5, 2, 4, 6)] == pytest.approx(
        [1.0, 1.25, 1.5, 1.6, 1.7], rel=0.01
    )
    assert 1.7 < table.predict("none", 7) < 1.9


def test_what_was_not_measured_follows_the_prior() -> None:
    table = CostTable(elasticity=0.2)
    observe(table, 4.0, 1.0, times=50)
    assert table.predict("none", 8.0) == pytest.approx(1.2)
    assert table.predict("none", 2.0) == pytest.approx(0.9)


def test_a_pause_counts_little_and_the_slow_first_runs_of_a_shape_nothing() -> None:
    table = CostTable(elasticity=0.2)
    observe(table, 4.0, 30.0, times=2)
    observe(table, 4.0, 1.0, times=20)
    assert table.predict("none", 4.0) == pytest.approx(1.0, rel=0.01)
    table.observe("none", 4.0, 1000.0)
    assert table.predict("none", 4.0) < 1.2
    table.observe("none", 1.0, 30.0)
    assert table.predict("none", 1.0) < 1.2, "fewer rows do not cost more"


def test_all_costs_follow_a_change_that_was_seen_in_one() -> None:
    table = CostTable(elasticity=0.2)
    observe(table, 1.0, 1.0, times=50)
    observe(table, 4.0, 2.0, times=50)
    for step in range(400):
        table.observe("none", 4.0, 2.0 * (1.0 + step / 400))
    assert 1.5 < table.predict("none", 1.0) < 2.1


def test_a_method_whose_steps_take_longer_has_costs_of_its_own() -> None:
    """Where drafts are made on the host, the next step cannot begin before this one ends."""
    table = CostTable(elasticity=0.2)
    for _ in range(100):
        table.observe("ngram", 4.0, 1.0)
        table.observe("suffix", 4.0, 1.5)
    assert table.predict("ngram", 4.0) == pytest.approx(1.0, rel=0.05)
    assert table.predict("suffix", 4.0) == pytest.approx(1.5, rel=0.05)


def test_unmeasured_batch_sizes_take_the_costs_of_the_nearest() -> None:
    costs = StepCosts()
    assert costs.verify(1, "none", 1.0) is None
    for _ in range(10):
        costs.observe_verify(2, "none", 1.0, 1.0)
        costs.observe_verify(32, "none", 1.0, 5.0)
    assert [costs.verify(n, "none", 1.0) for n in (1, 4, 16, 64)] == pytest.approx([1.0, 1.0, 5.0, 5.0])
    assert costs.draft("eagle", 4, 3) == 0.0


def test_drafts_that_several_made_are_shared_out() -> None:
    costs = StepCosts()
    for _ in range(10):
        costs.observe_drafts({"ngram": 3}, 8, 0.1)
    for _ in range(10):
        costs.observe_drafts({"ngram": 3, "eagle": 2}, 8, 0.4)
    assert costs.draft("eagle", 8, 2) == pytest.approx(0.3)
    for _ in range(10):
        costs.observe_drafts({"ngram": 3, "eagle": 2}, 8, 0.4)
    assert (costs.draft("ngram", 8, 3), costs.draft("eagle", 8, 2)) == pytest.approx((0.1, 0.3))
    for _ in range(10):
        costs.observe_drafts({"a": 3, "b": 2}, 8, 0.4)
    assert costs.draft("a", 8, 3) == 0.0, "of two that are unknown nothing can be said"


def test_catching_up_costs_by_the_token_what_the_steps_took_longer() -> None:
    costs = StepCosts()
    assert costs.feed("draft_model", 100) == 0.0
    for num_tokens in (50, 200, 10, 100):
        costs.observe_feed("draft_model", num_tokens, 0.01 * num_tokens, step_seconds=1.0)
    assert costs.feed("draft_model", 30) == pytest.approx(0.3)
    costs.observe_feed("draft_model", 1, 60.0, step_seconds=1.0)  # a pause
    assert costs.feed("draft_model", 30) < 0.6


def test_acceptance_counts_up_to_the_first_wrong_draft_by_position() -> None:
    acceptance = MethodAcceptance(forgetting=1.0, prior_weight=0.0)
    for _ in range(1000):
        acceptance.observe(5, 2)
    acceptance.observe(0, 0)
    assert [acceptance.rate(position) for position in range(4)] == pytest.approx([1, 1, 0, 2 / 3], abs=0.01)
    assert acceptance.found == pytest.approx(1000 / 1001)
    own = RequestAcceptance(acceptance)
    assert (own.rate(0), own.found) == pytest.approx((acceptance.rate(0), acceptance.found))
    for _ in range(100):
        own.observe(1, 0)
    assert own.rate(0) < 0.5
    assert expected_accepted(acceptance, 4) == pytest.approx([0, 1, 2, 2, 2], abs=0.02)


def test_where_fewer_drafts_came_than_were_asked_for_the_next_one_failed() -> None:
    """Two drafts of four, both right: of four that are asked for two are accepted, not nearly four."""
    acceptance = MethodAcceptance(prior_weight=0.0)
    for _ in range(1000):
        acceptance.observe(2, 2, num_asked=4)
    assert expected_accepted(acceptance, 4) == pytest.approx([0, 1, 2, 2, 2], abs=0.15)
    assert expected_drafted(acceptance, 4) == pytest.approx([0, 1, 2, 2, 2], abs=0.15)
    assert RequestAcceptance(acceptance).has_draft(3) == pytest.approx(0, abs=0.05)
    unaware = MethodAcceptance(prior_weight=0.0)
    for _ in range(1000):
        unaware.observe(2, 2)
    assert expected_drafted(unaware, 4) == [0, 1, 2, 3, 4]


def test_what_was_not_expected_is_a_surprise() -> None:
    method = MethodAcceptance()
    own = RequestAcceptance(method)
    assert not own.is_surprise(2, 2)
    for _ in range(50):
        method.observe(2, 0)
        own.observe(2, 0)
    assert own.is_surprise(2, 2)
    assert not own.is_surprise(2, 1)
    assert not own.is_surprise(0, 0)


def test_probes_cost_a_small_share_and_go_on_while_they_surprise() -> None:
    probe = MethodProbe(offset=0, last_step=0)
    probe.price(0.12)
    assert [step for step in range(1, 100) if probe.is_due(step)] == [32, 64, 96]
    probe.price(-0.5)
    assert probe.interval == 8
    probe.learn(is_surprise=True)
    assert [probe.is_due(step) for step in (100, 100, 101)] == [True, False, True]
    for _ in range(3):
        probe.learn(is_surprise=True)
    assert not probe.is_due(102), "not for ever"


def test_of_a_method_that_is_replayed_only_the_cost_is_probed() -> None:
    probe = MethodProbe(offset=0, last_step=0, is_replayed=True)
    probe.price(0.12)
    assert [step for step in range(1, 300) if probe.is_due(step)] == [128, 256]
    probe.price(-0.5)
    assert probe.interval == 32


def test_a_turn_is_not_missed_by_a_request_that_is_in_every_other_step() -> None:
    probe = MethodProbe(offset=1, last_step=0)
    assert [step for step in range(2, 40, 2) if probe.is_due(step)] == [2, 10, 18, 26, 34]
