"""The life of a request: outputs, prefix hits, aborts, errors, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.messages import AddRequest
from engine.stats import SpecObservation
from tests.support.fake_device import continuation
from tests.support.scheduler_harness import EOS, Received, SchedulerHarness, make_request

PROMPT = list(range(8, 28))


def prompt_before_eos(num_tokens: int) -> list[int]:
    """A prompt whose continuation has EOS as its token number `num_tokens`."""
    for first in range(40):
        for second in range(40):
            prompt = [first, second]
            if EOS in (tokens := continuation(prompt, num_tokens)) and tokens.index(EOS) == num_tokens - 1:
                return prompt
    raise AssertionError("no such prompt")


# ---- outputs -----------------------------------------------------------------------------------------------


def test_the_client_hears_of_its_prompt_when_the_first_chunk_is_computed() -> None:
    harness = SchedulerHarness(max_prefill_chunk=8)
    outputs = harness.run(make_request("a", PROMPT, max_tokens=2))["a"].outputs
    assert [(output.num_prompt_tokens, len(output.token_ids)) for output in outputs] == [
        (20, 0),
        (20, 1),
        (20, 1),
    ]
    assert outputs[0].times.first_scheduled > outputs[0].times.arrival > 0
    assert outputs[0].times.first_token == 0


def test_a_prompt_in_one_chunk_has_no_output_of_its_own() -> None:
    outputs = SchedulerHarness().run(make_request("a", PROMPT, max_tokens=2))["a"].outputs
    assert [len(output.token_ids) for output in outputs] == [1, 1]


def test_times_are_those_of_first_and_last_token() -> None:
    first, second = SchedulerHarness().run(make_request("a", PROMPT, max_tokens=2))["a"].outputs
    assert first.times.first_token == first.times.last_token
    assert second.times.first_token == first.times.first_token < second.times.last_token
    assert second.times.arrival == first.times.arrival


def test_the_time_in_the_queue_ends_with_the_first_step_whoever_comes_later_and_after_a_preemption() -> None:
    harness = SchedulerHarness(num_blocks=6)
    harness.run(*[make_request(name, [8 + index] * 4, max_tokens=12) for index, name in enumerate("ab")])
    assert sum(got.outputs[-1].num_preemptions for got in harness.received.values()) > 0
    for got in harness.received.values():
        (first_scheduled,) = {output.times.first_scheduled for output in got.outputs}
        assert got.outputs[0].times.arrival < first_scheduled < got.outputs[0].times.first_token


def test_the_arrival_time_of_the_frontend_is_kept() -> None:
    message = AddRequest(
        request_id="a", prompt_token_ids=[8], params=make_request("a", [8]).params, arrival_time=0.25
    )
    assert SchedulerHarness().run(message)["a"].outputs[0].times.arrival == 0.25


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_come_once_and_whole(chunk: int | None, depth: int) -> None:
    harness = SchedulerHarness(max_prefill_chunk=chunk, depth=depth)
    harness.run(make_request("warm", PROMPT))
    outputs = harness.run(make_request("a", PROMPT, prompt_logprobs=0))["a"].outputs
    delivered = outputs[0].prompt_logprobs
    assert delivered is not None
    assert delivered[0] is None
    assert [entry.token.token_id for entry in delivered[1:] if entry] == PROMPT[1:]
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    assert outputs[0].num_cached_tokens == 0


def test_prompt_logprobs_survive_a_preemption_between_chunks() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_prefill_chunk=4, depth=2)
    harness.add(make_request("a", PROMPT, priority=1, prompt_logprobs=0))
    for _ in range(2):
        harness.step()
    harness.run(make_request("urgent", [9]))
    outputs = harness.received["a"].outputs
    assert outputs[-1].num_preemptions == 1
    assert outputs[0].prompt_logprobs is not None
    assert len(outputs[0].prompt_logprobs) == len(PROMPT)


def test_a_prompt_of_one_token_has_no_prompt_logprob() -> None:
    outputs = SchedulerHarness().run(make_request("a", [8], prompt_logprobs=0))["a"].outputs
    assert outputs[0].prompt_logprobs == [None]


@pytest.mark.parametrize("index", range(6))
def test_a_stop_inside_a_run_cuts_everything_that_is_counted(index: int) -> None:
    """EOS at each index of a run of five accepted drafts and the bonus; the first token comes from the
    prefill.
    """
    prompt = prompt_before_eos(index + 2)
    harness = SchedulerHarness(k=5)
    received = harness.run(make_request("a", prompt, max_tokens=30, ignore_eos=False, logprobs=0))["a"]
    assert received.token_ids == continuation(prompt, index + 2)
    assert [entry.token.token_id for entry in received.logprobs] == received.token_ids
    assert received.spec == [
        SpecObservation(
            method="scripted",
            num_drafted=5,
            num_verifier_accepted=5,
            num_accepted=min(index + 1, 5),
            num_emitted=index + 1,
        )
    ]


def test_nothing_behind_a_stop_is_found_in_the_prefix_cache() -> None:
    """Known fault 7: the run went on behind EOS; a follow-up turn hits only what was confirmed."""
    prompt = prompt_before_eos(3)
    harness = SchedulerHarness(k=5, block_size=1)
    harness.run(make_request("a", prompt, max_tokens=30, ignore_eos=False))
    longer = prompt + continuation(prompt, 8)
    follow_up = harness.run(make_request("b", longer, max_tokens=1))["b"]
    assert follow_up.outputs[0].num_cached_tokens == len(prompt) + 3 - 1, (
        "the last token's KV was never needed"
    )


def test_the_row_gets_the_ids_that_min_tokens_masks() -> None:
    harness = SchedulerHarness()
    harness.run(
        make_request("a", [8], ignore_eos=False, stop_token_ids=(39, EOS)),
        make_request("b", [9], ignore_eos=True, stop_token_ids=(39,)),
    )
    assert [new.stop_ids for new in harness.plans[0].new_rows] == [(EOS, 39), (39,)]


# ---- prefix hits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_the_second_time_a_prompt_hits_the_same_whatever_the_drafts(length: int, k: int) -> None:
    """Known fault 22: prompts of n blocks and n blocks +- 1."""
    harness = SchedulerHarness(k=k, num_blocks=128)
    prompt = [8 + index % 30 for index in range(length)]
    first = harness.run(make_request("a", prompt))["a"]
    second = harness.run(make_request("b", prompt))["b"]
    assert second.token_ids == first.token_ids
    assert first.outputs[0].num_cached_tokens == 0
    assert second.outputs[0].num_cached_tokens == (length - 1) // 4 * 4


def test_running_requests_share_the_blocks_of_a_common_prefix() -> None:
    harness = SchedulerHarness(num_blocks=64)
    harness.add(make_request("a", PROMPT, max_tokens=10))
    harness.step()
    used = harness.scheduler.stats().num_used_blocks
    harness.add(make_request("b", [*PROMPT[:16], 39], max_tokens=10))
    harness.step()
    assert harness.scheduler.stats().num_used_blocks <= used + 2
    harness.run()


def test_a_salt_isolates() -> None:
    harness = SchedulerHarness()
    harness.run(make_request("a", PROMPT, cache_salt="one"))
    harness.run(make_request("b", PROMPT, cache_salt="two"))
    assert harness.received["b"].outputs[0].num_cached_tokens == 0


# ---- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_aborting_is_idempotent_in_every_state(depth: int) -> None:
    """Known fault 30: unknown, waiting, running, preempted, finished, twice, with steps in flight."""
    harness = SchedulerHarness(max_num_seqs=2, depth=depth, k=3)
    harness.add(*[make_request(name, PROMPT, max_tokens=20) for name in ("running", "stays", "waiting")])
    harness.launch()
    harness.launch()
    outputs = harness.abort("unknown", "running", "running", "waiting")
    assert [output.request_id for output in outputs] == ["running", "waiting"]
    assert {output.finish.reason for output in outputs if output.finish} == {"cancelled"}
    assert harness.abort("running", "waiting") == []
    harness.run()
    assert harness.abort("stays") == []
    assert len(harness.received["stays"].token_ids) == 20


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_of_an_aborted_request_waits_for_the_steps_in_flight(depth: int) -> None:
    harness = SchedulerHarness(max_num_seqs=1, depth=depth)
    harness.add(make_request("a", PROMPT), make_request("b", PROMPT))
    harness.launch()
    harness.abort("a")
    assert harness.launch() is None
    harness.collect()
    plan = harness.launch()
    assert plan is not None
    assert plan.new_rows[0].request_id == "b"
    harness.run()


def test_unusable_logits_end_one_request_with_an_error() -> None:
    harness = SchedulerHarness(depth=2, k=3)
    harness.device.nan_requests = {"bad"}
    harness.run(*[make_request(name, PROMPT) for name in ("a", "bad", "b")])
    finish = harness.received["bad"].finish
    assert finish is not None
    assert finish.reason == "error"
    assert "NaN" in finish.message
    assert [len(harness.received[name].token_ids) for name in ("a", "b")] == [8, 8]


def test_blocks_of_a_failed_request_are_not_found() -> None:
    harness = SchedulerHarness(max_prefill_chunk=8)
    harness.device.nan_requests = {"bad"}
    harness.run(make_request("bad", PROMPT))
    assert harness.scheduler.stats().num_cached_blocks == 0


ENDS: dict[str, Callable[[SchedulerHarness, str], object]] = {
    "finish": lambda harness, name: None,
    "abort": lambda harness, name: harness.abort(name),
    "error": lambda harness, name: harness.device.nan_requests.add(name),
}


DRAFTER_KV: dict[str, dict[str, Any]] = {
    "none": {},
    "keeps up": {"has_drafter": True},
    "catches up": {"fed_windows": (None, 3)},
}


@pytest.mark.parametrize("drafter_kv", DRAFTER_KV)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("end", ENDS)
def test_many_short_requests_leave_nothing_behind(end: str, depth: int, drafter_kv: str) -> None:
    """Known fault 26."""
    harness = SchedulerHarness(depth=depth, k=2, num_blocks=16, **DRAFTER_KV[drafter_kv])
    for index in range(300):
        name = f"r{index}"
        harness.add(make_request(name, [8 + index % 30] * 5, max_tokens=3))
        harness.step()
        ENDS[end](harness, name)
    harness.run()
    assert not harness.scheduler._requests
    assert harness.scheduler._kv._num_committed == {}


def test_stats_count_what_runs_and_waits() -> None:
    harness = SchedulerHarness(max_num_seqs=1, max_prefill_chunk=8, num_blocks=64)
    harness.add(make_request("a", PROMPT), make_request("b", [9] * 7))
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.num_waiting_tokens == 12 + 7
    assert (stats.num_blocks, stats.num_used_blocks) == (64, 5)
    assert stats.kv_cache_usage == 5 / 64
    harness.run()


def test_nothing_to_do_is_no_plan() -> None:
    harness = SchedulerHarness()
    assert harness.launch() is None
    assert not harness.scheduler.has_unfinished


def received_tokens(received: dict[str, Received]) -> dict[str, list[int]]:
    return {name: got.token_ids for name, got in received.items()}


def test_two_groups_give_the_same_tokens_as_one() -> None:
    messages = [make_request(f"r{index}", PROMPT[: 5 + 3 * index], max_tokens=12) for index in range(5)]
    results = [
        received_tokens(SchedulerHarness(num_groups=num_groups, num_blocks=14, k=2).run(*messages))
        for num_groups in (1, 2)
    ]
    assert results[0] == results[1]
