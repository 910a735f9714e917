"""Budgets, context, max_tokens, queue: what a step may hold and what a request may ask."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequestError, QueueFullError, RequestIdInUseError
from engine.request import Request
from engine.scheduler.chunk_policy import MIN_CHUNK, UNMEASURED_CHUNK
from engine.scheduler.draft_policy import DraftChoice, FixedDraftPolicy
from engine.step import StepPlan
from tests.support.fake_device import continuation
from tests.support.scheduler_harness import SchedulerHarness, make_request

PROMPT = list(range(8, 28))


def decodes(plan: StepPlan) -> list[int]:
    return [entry.num_tokens for entry in plan.scheduled if not entry.is_prefill]


def chunks(plan: StepPlan) -> list[int]:
    return [entry.num_tokens for entry in plan.scheduled if entry.is_prefill]


# ---- adding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fields", "field", "message"),
    [
        ([], {}, "prompt", "got no tokens"),
        (range(32), {}, "prompt", "got 32 tokens, expected at most 31"),
        ([8], {"method": "eagle"}, "speculation.method", "got 'eagle', expected one of 'none', 'scripted'"),
        ([8], {"k": 4}, "speculation.num_speculative_tokens", "got 4, expected 0..3"),
        ([8], {"k": -1}, "speculation.num_speculative_tokens", "got -1, expected 0..3"),
        ([8], {"method": "none", "k": 1}, "speculation.num_speculative_tokens", "expected 0..0"),
    ],
)
def test_what_cannot_run_is_refused(
    prompt: list[int], fields: dict[str, object], field: str, message: str
) -> None:
    harness = SchedulerHarness(max_model_len=32, k=3)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        harness.scheduler.add(make_request("a", prompt, **fields))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert not harness.scheduler.has_unfinished


def test_what_never_fits_the_kv_cache_is_refused() -> None:
    harness = SchedulerHarness(block_size=4, num_blocks=4, max_model_len=128)
    with pytest.raises(InvalidRequestError, match="whole KV cache") as caught:
        harness.scheduler.add(make_request("a", range(16)))
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequestError, match="expected at most 6") as caught:
        harness.scheduler.add(make_request("a", range(10), max_tokens=7))
    assert caught.value.field == "max_tokens"
    harness.run(make_request("a", range(10), max_tokens=6))


def test_an_id_is_free_again_when_its_request_ended() -> None:
    harness = SchedulerHarness()
    harness.add(make_request("a", [8]))
    with pytest.raises(RequestIdInUseError, match="'a'"):
        harness.scheduler.add(make_request("a", [9]))
    harness.run()
    harness.run(make_request("a", [9]))


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    harness = SchedulerHarness(max_waiting=2)
    harness.add(make_request("a", [8]), make_request("b", [8]))
    with pytest.raises(QueueFullError, match="the limit is 2") as caught:
        harness.scheduler.add(make_request("c", [8]))
    assert caught.value.retry_after > 0
    harness.launch()
    harness.add(make_request("c", [8]))
    harness.run()


# ---- budget ------------------------------------------------------------------------------------------------


def test_the_budget_counts_drafts_and_the_chunk_shrinks() -> None:
    """Known fault 14: all rows verify while a long prompt is chunked at full budget."""
    harness = SchedulerHarness(k=3, max_num_seqs=5, max_num_batched_tokens=40, num_blocks=256)
    harness.add(*[make_request(f"r{index}", [8 + index], max_tokens=60) for index in range(4)])
    for _ in range(2):
        harness.step()
    harness.add(make_request("long", [9] * 100))
    harness.step()
    assert decodes(harness.plans[-1]) == [4, 4, 4, 4]
    assert chunks(harness.plans[-1]) == [24]
    harness.run()


def test_drafts_give_way_to_the_share_of_a_prefill() -> None:
    harness = SchedulerHarness(k=5, max_num_seqs=5, max_num_batched_tokens=24, num_blocks=256)
    harness.add(*[make_request(f"r{index}", [8 + index], max_tokens=60) for index in range(4)])
    for _ in range(2):
        harness.step()
    assert sum(decodes(harness.plans[-1])) == 24
    harness.add(make_request("long", [9] * 60))
    harness.step()
    assert sum(decodes(harness.plans[-1])) == 12
    assert chunks(harness.plans[-1]) == [12]
    harness.run()


def test_decodes_that_do_not_fit_take_turns() -> None:
    harness = SchedulerHarness(max_num_seqs=6, max_num_batched_tokens=4)
    harness.add(*[make_request(f"r{index}", [8 + index], max_tokens=20) for index in range(6)])
    while harness.scheduler.stats().num_waiting:
        harness.step()
    before = {name: len(received.token_ids) for name, received in harness.received.items()}
    for _ in range(6):
        harness.step()
    served = [len(received.token_ids) - before[name] for name, received in harness.received.items()]
    assert served == [4] * 6
    harness.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_is_computed_in_chunks_without_waiting_for_results(depth: int) -> None:
    harness = SchedulerHarness(depth=depth, max_num_batched_tokens=8)
    harness.add(make_request("a", PROMPT))
    for _ in range(depth):
        harness.launch()
    starts = [entry.start for plan in harness.plans for entry in plan.scheduled]
    assert starts == [0, 8][:depth]
    assert harness.launch() is None
    harness.run()


def test_no_request_gets_a_sliver_beside_another_chunk() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=24, num_blocks=256)
    harness.add(make_request("a", PROMPT), make_request("b", PROMPT[::-1]))
    plan = harness.launch()
    assert plan is not None
    assert chunks(plan) == [20]
    harness.run()


def test_what_a_prompt_has_in_the_prefix_cache_is_no_part_of_its_chunk() -> None:
    harness = SchedulerHarness(max_num_batched_tokens=24, num_blocks=256)
    harness.run(make_request("before", PROMPT))
    harness.add(make_request("a", PROMPT[::-1]), make_request("b", PROMPT))
    plan = harness.launch()
    assert plan is not None
    assert chunks(plan) == [20, 4]  # the last block of a full hit is computed again
    harness.run()


def test_a_long_prompt_does_not_stall_running_streams() -> None:
    """Known fault 35: one stream and a long prompt; the stream gets a token in every step."""
    harness = SchedulerHarness(
        max_prefill_stall=0.05, max_num_batched_tokens=512, num_blocks=512, max_model_len=1200
    )
    harness.add(make_request("stream", [8], max_tokens=100))
    harness.step()
    harness.add(make_request("long", [9] * 1000, max_tokens=2))
    harness.step()
    assert chunks(harness.plans[-1]) == [UNMEASURED_CHUNK]
    for expected in (2 * UNMEASURED_CHUNK, 100):  # a chunk at most doubles; 100 tokens take the stall
        harness.scheduler.observe_step(harness.plans[-1], sum(chunks(harness.plans[-1])) * 0.0005)
        harness.step()
        assert chunks(harness.plans[-1]) == [expected]
    for _ in range(10):
        harness.scheduler.observe_step(harness.plans[-1], 100.0)
    harness.step()
    assert chunks(harness.plans[-1]) == [MIN_CHUNK]
    assert all(decodes(plan) == [1] for plan in harness.plans[1:])
    harness.run()


def test_a_prefill_alone_has_the_whole_budget() -> None:
    harness = SchedulerHarness(
        max_prefill_stall=0.05, max_num_batched_tokens=512, num_blocks=512, max_model_len=1200
    )
    harness.add(make_request("long", [9] * 1000))
    harness.launch()
    assert chunks(harness.plans[-1]) == [512]
    harness.run()


# ---- drafts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("k", [1, 5])
def test_no_draft_is_asked_or_verified_past_max_tokens(max_tokens: int, k: int, depth: int) -> None:
    """Known fault 15."""
    harness = SchedulerHarness(depth=depth, k=k)
    received = harness.run(make_request("a", PROMPT, max_tokens=max_tokens))["a"]
    assert received.token_ids == continuation(PROMPT, max_tokens)
    for plan in harness.plans:
        for entry in plan.scheduled:
            assert entry.num_next_drafts <= max(max_tokens - 2, 0)
    if depth == 1:
        assert sum(entry.num_drafts for plan in harness.plans for entry in plan.scheduled) < max_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("room", range(1, 8))
def test_generation_ends_exactly_at_the_context_limit(room: int, depth: int) -> None:
    """Known fault 12."""
    harness = SchedulerHarness(depth=depth, k=5, max_model_len=len(PROMPT) + room)
    received = harness.run(make_request("a", PROMPT, max_tokens=100))["a"]
    assert received.token_ids == continuation(PROMPT, room)
    assert received.finish is not None
    assert received.finish.reason == "length"


def test_no_step_is_launched_for_a_request_that_steps_in_flight_finish() -> None:
    harness = SchedulerHarness(depth=2)
    harness.add(make_request("a", PROMPT, max_tokens=2))
    assert harness.launch() is not None
    assert harness.launch() is not None
    harness.collect()
    assert harness.launch() is None, "two tokens are certain"
    harness.run()


def test_a_chunk_that_does_not_end_the_prefill_asks_no_drafts() -> None:
    harness = SchedulerHarness(k=3, max_prefill_chunk=8)
    harness.run(make_request("a", PROMPT))
    asked = [entry.num_next_drafts for plan in harness.plans[:3] for entry in plan.scheduled]
    assert asked == [0, 0, 3]
    methods = [entry.method for plan in harness.plans[:3] for entry in plan.scheduled]
    assert methods == ["scripted"] * 3, "the drafter keeps up with the prefill"


def test_requests_with_and_without_drafts_share_a_step() -> None:
    """Known fault 34: k = 0 beside k = 3, and a first decode beside older ones."""
    harness = SchedulerHarness(k=3)
    harness.add(
        make_request("off", PROMPT, method="none", max_tokens=30),
        make_request("zero", PROMPT, k=0, max_tokens=30),
        make_request("one", PROMPT, k=1, max_tokens=30),
        make_request("auto", PROMPT, method="auto", max_tokens=30),
    )
    for _ in range(2):
        harness.step()
    assert decodes(harness.plans[-1]) == [1, 1, 2, 4]
    harness.run()
    observed = {name: {spec.num_drafted for spec in got.spec} for name, got in harness.received.items()}
    assert observed["off"] == observed["zero"] == set()
    assert observed["one"] == {1}
    assert 3 in observed["auto"]


def test_the_draft_policy_is_told_how_many_decode_whatever_prefills_beside_them() -> None:
    """Its choice for one stream is not that for a full batch only because prompts are being computed."""
    seen: list[int] = []

    class Listening(FixedDraftPolicy):
        def choose(self, request: Request, num_decoding: int) -> DraftChoice:
            if len(request.token_ids) > request.num_prompt_tokens:
                seen.append(num_decoding)
            return super().choose(request, num_decoding)

    harness = SchedulerHarness(
        k=3, max_num_seqs=8, max_prefill_chunk=4, num_blocks=128, make_policy=Listening
    )
    harness.add(make_request("stream", [8], max_tokens=16))
    harness.step()
    harness.add(*[make_request(f"prompt{index}", [8 + index] * 100, max_tokens=1) for index in range(6)])
    for _ in range(3):
        harness.step()
        assert len(chunks(harness.plans[-1])) >= 1
    assert seen == [1, 1, 1]
    harness.run()
