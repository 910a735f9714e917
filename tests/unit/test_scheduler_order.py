"""Who is served first, who has to make room, and what a preempted request gets back."""

from __future__ import annotations

import pytest

from tests.support.fake_device import continuation
from tests.support.scheduler_harness import SchedulerHarness, make_request


def running(harness: SchedulerHarness) -> list[str]:
    return [request.request_id for request in harness.scheduler._running]


def test_admission_is_first_come_first_served_within_a_priority() -> None:
    harness = SchedulerHarness(max_num_seqs=2)
    harness.add(
        make_request("late", [8], priority=1),
        make_request("a", [8]),
        make_request("b", [8]),
        make_request("c", [8]),
        make_request("first", [8], priority=-1),
    )
    finished = []
    while harness.scheduler.has_unfinished:
        harness.step()
        finished += [name for name, got in harness.received.items() if got.finish and name not in finished]
    assert finished[0] in ("first", "a")
    assert set(finished[:2]) == {"first", "a"}
    assert finished[-1] == "late"


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=4)
    harness.add(make_request("a", [8] * 13, max_tokens=8))
    harness.step()
    harness.add(make_request("big", [9] * 20, max_tokens=4), make_request("small", [10], max_tokens=1))
    harness.step()
    assert running(harness) == ["a"]
    harness.run()


def test_a_step_away_from_the_limit_an_admission_leaves_blocks_for_growth() -> None:
    harness = SchedulerHarness(num_blocks=4, block_size=4)
    harness.add(make_request("a", [8] * 7, max_tokens=4))
    harness.step()
    harness.add(make_request("b", [9] * 8, max_tokens=2))
    harness.step()
    assert running(harness) == ["a"], "two blocks are free, one is the watermark"
    harness.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_higher_priority_takes_the_row_of_the_lowest_and_latest(depth: int) -> None:
    harness = SchedulerHarness(max_num_seqs=3, depth=depth, num_blocks=256)
    harness.add(
        make_request("normal", [8], max_tokens=20),
        make_request("low", [9], priority=2, max_tokens=20),
        make_request("later", [10], priority=2, max_tokens=20),
    )
    for _ in range(3):
        harness.step()
    harness.add(make_request("urgent", [11], priority=1, max_tokens=4))
    for _ in range(3):
        harness.step()
    assert running(harness) == ["normal", "urgent", "low"]
    harness.run()
    preempted = {name for name, got in harness.received.items() if got.outputs[-1].num_preemptions}
    assert preempted == {"later"}


def test_an_equal_priority_preempts_nobody() -> None:
    harness = SchedulerHarness(max_num_seqs=1)
    harness.add(make_request("a", [8], max_tokens=5))
    harness.step()
    harness.add(make_request("b", [9], max_tokens=5))
    harness.run()
    assert harness.scheduler.stats().num_preemptions_total == 0


def test_nobody_is_preempted_when_that_would_not_be_enough() -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=4)
    harness.add(
        make_request("a", [8] * 12, max_tokens=20), make_request("low", [9] * 3, priority=5, max_tokens=4)
    )
    harness.step()
    harness.add(make_request("urgent", [10] * 24, priority=1, max_tokens=4))
    harness.step()
    assert running(harness) == ["a", "low"]
    harness.run()


def test_blocks_are_freed_for_a_higher_priority() -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=4)
    harness.add(make_request("low", [8] * 20, priority=5, max_tokens=8))
    harness.step()
    harness.add(make_request("urgent", [9] * 24, max_tokens=4))
    harness.step()
    assert running(harness) == ["urgent"]
    harness.run()


def test_those_who_share_a_prefix_give_it_back_together() -> None:
    """Of 16 blocks two hold 8 in common and 2 each; the urgent one needs 12, and 1 is the watermark."""
    harness = SchedulerHarness(num_blocks=16, block_size=4)
    for name in ("low", "lower"):
        harness.add(make_request(name, [8] * 32 + [len(name)] * 3, priority=5, max_tokens=8))
        harness.step()
    harness.add(make_request("urgent", [9] * 46, max_tokens=2))
    harness.step()
    assert running(harness) == ["urgent"]
    harness.run()


def test_nobody_is_preempted_for_blocks_that_the_higher_priority_would_share() -> None:
    """`low` alone holds what the urgent one begins with: of its blocks, those are no gain."""
    harness = SchedulerHarness(num_blocks=11, block_size=4)
    harness.add(
        make_request("a", [10] * 8, max_tokens=8), make_request("low", [8] * 18, priority=5, max_tokens=8)
    )
    harness.step()
    harness.add(make_request("urgent", [8] * 16 + [9] * 20, priority=1, max_tokens=4))
    harness.step()
    assert running(harness) == ["a", "low"]
    harness.run()


def test_nobody_is_preempted_whose_blocks_are_not_needed() -> None:
    """The last one has two blocks, which are not enough; the one before it has all that is needed."""
    harness = SchedulerHarness(num_blocks=16, block_size=4)
    harness.add(
        make_request("low", [8] * 40, priority=5, max_tokens=8), make_request("last", [9] * 5, priority=5)
    )
    harness.step()
    harness.add(make_request("urgent", [10] * 42, priority=1, max_tokens=4))
    harness.step()
    assert running(harness) == ["urgent", "last"]
    assert harness.scheduler.stats().num_preemptions_total == 1
    harness.run()


def test_a_higher_priority_that_needs_all_blocks_gets_them() -> None:
    harness = SchedulerHarness(num_blocks=8, block_size=4)
    harness.add(make_request("low", [8] * 6, priority=5, max_tokens=20))
    harness.step()
    harness.add(make_request("urgent", [10] * 31, priority=1, max_tokens=1))
    harness.step()
    assert harness.received["urgent"].finish
    assert harness.scheduler.stats().num_preemptions_total == 1
    harness.run()


def test_a_higher_priority_prefills_before_a_prefill_that_runs() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=16, num_blocks=256)
    harness.add(make_request("low", [8] * 100, priority=1))
    harness.step()
    harness.add(make_request("urgent", [9] * 30))
    harness.step()
    assert running(harness) == ["urgent", "low"]
    assert [entry.max_seq_len for entry in harness.plans[-1].scheduled] == [16]
    assert harness.plans[-1].new_rows[0].request_id == "urgent"
    harness.run()


def test_growth_preempts_the_last_served_and_never_a_better_one() -> None:
    harness = SchedulerHarness(num_blocks=6, block_size=4)
    harness.add(make_request("a", [8] * 7, max_tokens=12), make_request("b", [9] * 7, max_tokens=12))
    harness.run()
    preemptions = {name: got.outputs[-1].num_preemptions for name, got in harness.received.items()}
    assert preemptions["a"] == 0
    assert preemptions["b"] > 0


@pytest.mark.parametrize("k", [1, 3, 5])
def test_drafts_preempt_nobody(k: int) -> None:
    """Both fit exactly without drafts: 8 + 8 slots of 4 blocks. Drafts that need more are dropped."""
    harness = SchedulerHarness(num_blocks=5, block_size=4, k=k, num_right=lambda k: 0)
    harness.run(make_request("a", [8] * 3, max_tokens=6), make_request("b", [9] * 3, max_tokens=6))
    assert harness.scheduler.stats().num_preemptions_total == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_preemption_with_steps_in_flight_changes_no_token(k: int, depth: int) -> None:
    """Known fault 27: the results in flight of a preempted request count once, and it resumes from them."""
    accepted = iter(range(10**6))
    harness = SchedulerHarness(
        num_blocks=8, block_size=4, k=k, depth=depth, num_right=lambda k: next(accepted) % (k + 1)
    )
    prompts = {f"r{index}": [8 + index] * 6 for index in range(4)}
    harness.run(*[make_request(name, prompt, max_tokens=20) for name, prompt in prompts.items()])
    assert harness.scheduler.stats().num_preemptions_total >= 2
    for name, prompt in prompts.items():
        assert harness.received[name].token_ids == continuation(prompt, 20)


def test_tokens_in_flight_of_a_preempted_request_are_delivered_and_it_resumes_behind_them() -> None:
    harness = SchedulerHarness(max_num_seqs=1, depth=2)
    harness.add(make_request("low", [8] * 4, priority=1, max_tokens=10))
    harness.launch()
    harness.launch()
    harness.collect()
    harness.add(make_request("urgent", [9] * 4, max_tokens=1))
    assert harness.launch() is None, "low is preempted, but its row is fenced by the step in flight"
    assert running(harness) == []
    harness.collect()
    assert len(harness.received["low"].token_ids) == 2
    harness.run()
    resumed = next(new for plan in harness.plans for new in plan.new_rows if len(new.token_ids) == 6)
    assert resumed.token_ids == [8] * 4 + harness.received["low"].token_ids[:2]
    assert resumed.num_prompt_tokens == 4
    assert resumed.num_computed_tokens == 4, "it hits its own blocks"
    assert harness.received["low"].outputs[-1].num_cached_tokens == 0, "counted when first scheduled only"


def test_a_preempted_request_can_end_by_what_was_in_flight() -> None:
    harness = SchedulerHarness(max_num_seqs=1, depth=2)
    harness.add(make_request("low", [8] * 4, priority=1, max_tokens=2))
    harness.launch()
    harness.launch()
    harness.collect()
    harness.add(make_request("urgent", [9] * 4, max_tokens=1))
    harness.launch()
    harness.collect()
    assert harness.received["low"].finish is not None
    assert harness.scheduler.stats().num_waiting == 1
    harness.run()


def test_a_preempted_request_does_not_resume_before_its_steps_are_collected() -> None:
    """Rows and blocks for it are free at once, because the request that it made room for went away."""
    harness = SchedulerHarness(num_blocks=12, block_size=4, depth=2, enable_prefix_cache=False)
    harness.add(make_request("low", [8] * 8, priority=1, max_tokens=10))
    harness.launch()
    harness.add(make_request("urgent", [9] * 41, max_tokens=1))
    assert harness.launch() is None, "low is preempted, its blocks are fenced"
    harness.abort("urgent")
    assert harness.launch() is None, "the token in flight is not known yet"
    harness.collect()
    plan = harness.launch()
    assert plan is not None
    assert len(plan.new_rows[0].token_ids) == 9
    harness.run()


def test_blocks_that_come_back_with_the_steps_in_flight_are_waited_for() -> None:
    """One preemption covers the need: the blocks are fenced, and nobody else is preempted meanwhile."""
    harness = SchedulerHarness(num_blocks=5, block_size=4, depth=2)
    harness.add(*[make_request(f"r{index}", [8 + index] * 3, max_tokens=10) for index in range(4)])
    harness.launch()
    harness.launch()
    harness.collect()
    plan = harness.launch()
    assert plan is not None
    assert [entry.max_seq_len for entry in plan.scheduled] == [8], "the first takes the last free block"
    assert running(harness) == ["r0", "r1", "r2"]
    assert harness.scheduler.stats().num_preemptions_total == 1
    harness.run()


def test_when_those_whose_turn_it_is_wait_for_blocks_others_go_on() -> None:
    """`c` waits and has a share of the budget of two, so `a` and `b` take turns; then the pool is full at the
    turn of `b`, and only `a` may take blocks from it.
    """
    harness = SchedulerHarness(
        num_blocks=7, block_size=1, max_num_batched_tokens=2, enable_prefix_cache=False
    )
    harness.add(make_request("a", [8], max_tokens=6), make_request("b", [9], max_tokens=5))
    harness.step()
    harness.add(make_request("c", [10] * 6, max_tokens=1))
    for _ in range(5):
        harness.step()
    assert harness.scheduler.stats().num_used_blocks == 7
    harness.step()
    assert running(harness) == ["a"]
    harness.run()
