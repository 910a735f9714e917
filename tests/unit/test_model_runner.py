"""One step on the device: what waits for the host, what is counted, and log probabilities of chunked prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.core import EngineCore
from engine.executor import Executor
from engine.messages import PositionLogprobs
from engine.spec_decode.speculator import BaseSpeculator
from engine.step import BlockTableUpdate, HostInputs, NewRow, RowResult, ScheduledRequest, StepPlan
from engine.worker import model_runner
from tests.support.engine_harness import Harness, Result, make_core, request, scripted_model
from tests.support.scripted_speculators import EOS, PATTERNS, VOCAB_SIZE, ScriptedSpeculator
from tests.support.scripted_target import ScriptedTarget, reference_continuation

PROMPT = (5, 6, 7)
FUTURE = reference_continuation(ScriptedTarget(VOCAB_SIZE), list(PROMPT), 60)


def oracle(prompt: tuple[int, ...] = PROMPT) -> dict[str, BaseSpeculator]:
    future = reference_continuation(ScriptedTarget(VOCAB_SIZE), list(prompt), 80)
    return {"scripted": ScriptedSpeculator(PATTERNS["oracle"], {prompt: future})}


def executor_of(core: EngineCore) -> Executor:
    return core._executor


def first_step(
    num_next_drafts: int = 0, token_limit: int = 60, needs_host_inputs: bool = False, **params: Any
) -> StepPlan:
    """The whole prompt in row 0."""
    return StepPlan(
        step=1,
        scheduled=[
            ScheduledRequest(
                row=0,
                num_tokens=3,
                start=0,
                max_seq_len=3,
                method="scripted" if num_next_drafts else "none",
                num_next_drafts=num_next_drafts,
            )
        ],
        new_rows=[
            NewRow(
                row=0,
                request_id="r",
                token_ids=list(PROMPT),
                num_prompt_tokens=3,
                num_computed_tokens=0,
                token_limit=token_limit,
                params=request("r", PROMPT, **params).params,
                stop_ids=(EOS,),
            )
        ],
        block_table_updates=[BlockTableUpdate(0, 0, 0, [3, 5])],
        needs_host_inputs=needs_host_inputs,
    )


def verification(num_drafts: int, needs_host_inputs: bool = False) -> StepPlan:
    entry = ScheduledRequest(row=0, num_tokens=1 + num_drafts, num_drafts=num_drafts, max_seq_len=20)
    return StepPlan(step=2, scheduled=[entry], needs_host_inputs=needs_host_inputs)


def execute(executor: Executor, plan: StepPlan) -> RowResult:
    (row,) = executor.collect(executor.launch(plan)).rows
    return row


def bitmask(*allowed: Sequence[int]) -> HostInputs:
    """Tokens that may be drawn at each logits row."""
    words = np.zeros((len(allowed), VOCAB_SIZE // 32), dtype="<u4")
    for line, token_ids in zip(words, allowed, strict=True):
        for token_id in token_ids:
            line[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return HostInputs(token_bitmask=words.tobytes())


# ---- host inputs ---------------------------------------------------------------------------------------------------


def test_nothing_is_drawn_before_the_host_inputs_are_there() -> None:
    executor = executor_of(make_core(scripted_model()))
    handle = executor.launch(first_step(needs_host_inputs=True))
    with pytest.raises(AssertionError, match="collect before provide"):
        executor.collect(handle)
    executor.provide(handle, HostInputs())
    with pytest.raises(AssertionError, match="part B was launched already"):
        executor.provide(handle, HostInputs())
    assert executor.collect(handle).rows[0].token_ids == FUTURE[:1]


def test_a_step_that_does_not_wait_takes_no_host_inputs() -> None:
    executor = executor_of(make_core(scripted_model()))
    with pytest.raises(AssertionError, match="does not wait"):
        executor.provide(executor.launch(first_step()), HostInputs())


def test_masks_hold_at_every_draft_position() -> None:
    """The second draft is right, but not allowed: it is rejected, and an allowed token stands in its place."""
    executor = executor_of(make_core(scripted_model(), speculators=oracle(), k=3))
    assert execute(executor, first_step(num_next_drafts=3)).token_ids == FUTURE[:1]
    anything = range(VOCAB_SIZE)
    others = [token_id for token_id in anything if token_id != FUTURE[2]]
    handle = executor.launch(verification(3, needs_host_inputs=True))
    executor.provide(handle, bitmask(anything, others, anything, anything))
    (row,) = executor.collect(handle).rows
    assert row.num_drafted == 3
    assert row.num_accepted == 1
    assert row.token_ids[0] == FUTURE[1]
    assert row.token_ids[1] in others
    assert len(row.token_ids) == 2


def test_logprobs_are_the_raw_ones_under_a_mask_too() -> None:
    target = ScriptedTarget(VOCAB_SIZE)
    executor = executor_of(make_core(scripted_model()))
    handle = executor.launch(first_step(needs_host_inputs=True, logprobs=2))
    executor.provide(handle, bitmask([40]))
    (row,) = executor.collect(handle).rows
    assert row.token_ids == [40]
    assert row.logprobs is not None
    (entry,) = row.logprobs
    plain = execute(executor_of(make_core(scripted_model())), first_step(logprobs=target.vocab_size))
    assert plain.logprobs is not None
    assert entry.top == plain.logprobs[0].top[:2]
    assert entry.token in plain.logprobs[0].top


# ---- counts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1, 2, 3, 4, 9])
def test_no_more_is_drafted_than_the_token_limit_leaves_room_for(room: int) -> None:
    """The device knows the room exactly, whatever the plan wished: a verification also emits a token of its own."""
    emitted = min(room, 4)
    executor = executor_of(make_core(scripted_model(), speculators=oracle(), k=3))
    execute(executor, first_step(num_next_drafts=3, token_limit=len(PROMPT) + 1 + room))
    row = execute(executor, verification(3))
    assert row.token_ids == FUTURE[1 : 1 + emitted]
    assert row.num_drafted == row.num_accepted == max(emitted - 1, 0)
    assert row.draft_method == "scripted"


def run_alone(depth: int, **params: Any) -> Result:
    core = make_core(
        scripted_model(),
        speculators=oracle(),
        k=5,
        deferred=depth > 1,
        config={"max_steps_in_flight": depth},
    )
    return Harness(core).run([request("r", PROMPT, **params)])["r"]


@pytest.mark.parametrize("depth", [1, 2])
def test_right_drafts_are_discarded_only_behind_a_stop(depth: int) -> None:
    for max_tokens in range(1, 20):
        for seen in run_alone(depth, max_tokens=max_tokens, ignore_eos=True).spec:
            assert seen.num_drafted == seen.num_verifier_accepted == seen.num_accepted
            assert seen.num_discarded_after_stop == seen.num_discarded_over_limit == 0
    for stop in range(2, 8):
        seen = run_alone(depth, max_tokens=40, ignore_eos=True, stop_token_ids=(FUTURE[stop],)).spec[-1]
        assert seen.num_discarded_over_limit == 0
        assert (
            seen.num_drafted
            == seen.num_verifier_accepted
            == seen.num_accepted + seen.num_discarded_after_stop
        )


# ---- prompt log probabilities --------------------------------------------------------------------------------------


def prompt_logprobs(
    prompt: tuple[int, ...], num_top: int, chunk: int | None, depth: int = 1
) -> list[PositionLogprobs | None]:
    """Of a request that shares its steps with another one."""
    core = make_core(
        scripted_model(),
        deferred=depth > 1,
        config={"max_steps_in_flight": depth},
        scheduler={"max_prefill_chunk": chunk},
        cache={"block_size": 4},
    )
    neighbour = request("n", (9, 8, 7, 6, 5), prompt_logprobs=1)
    own = request("r", prompt, prompt_logprobs=num_top, max_tokens=2)
    result = Harness(core).run([neighbour, own])["r"]
    assert result.prompt_logprobs is not None
    return result.prompt_logprobs


def expected_prompt_logprobs(prompt: tuple[int, ...]) -> list[float]:
    """One prefix at a time: each prompt token as the only one that may be drawn there."""
    core = make_core(scripted_model())
    result = []
    for length in range(1, len(prompt)):
        name = f"r{length}"
        plain = request(name, prompt[:length], max_tokens=1, logprobs=0, allowed_token_ids=(prompt[length],))
        result.append(Harness(core).run([plain])[name].logprobs[0].token.logprob)
    return result


@pytest.mark.parametrize("length", [1, 2, 3, 13])
@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_over_chunks_equal_those_at_once(
    length: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tuple(range(20, 20 + length))
    at_once = prompt_logprobs(prompt, 3, None)
    assert len(at_once) == length
    assert at_once[0] is None
    entries = [entry for entry in at_once if entry is not None]
    assert [entry.token.token_id for entry in entries] == list(prompt[1:])
    assert [entry.token.logprob for entry in entries] == pytest.approx(expected_prompt_logprobs(prompt))
    assert all(len(entry.top) == 3 for entry in entries)
    for chunk in (1, 2, 3, 7):
        assert prompt_logprobs(prompt, 3, chunk, depth) == at_once, chunk
    monkeypatch.setattr(model_runner, "PROMPT_LOGPROBS_CHUNK", 2)
    assert prompt_logprobs(prompt, 3, None, depth) == at_once
    assert prompt_logprobs(prompt, 3, 7, depth) == at_once


def test_inference_mode_ends_with_the_step() -> None:
    Harness(make_core(scripted_model())).run([request("r", PROMPT)])
    assert not torch.is_inference_mode_enabled()
