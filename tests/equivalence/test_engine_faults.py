"""Faults of one request touch no other: NaN logits, aborts at any step, a full pool, host inputs."""

from __future__ import annotations

import itertools
import random
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.errors import InvalidRequestError, QueueFullError
from engine.executor import SingleExecutor
from engine.params import Constraint
from engine.sampling.states import SamplingStates
from engine.step import BlockTableUpdate, HostInputs, NewRow, ScheduledRequest, StepPlan
from tests.support.engine_harness import Harness, make_core, request, scripted_model
from tests.support.scripted_target import ScriptedTarget, reference_continuation

PROMPTS = [[random.Random(seed).randrange(3, 60) for _ in range(5 + 3 * seed)] for seed in range(6)]
TARGET = ScriptedTarget()


def expected(prompt: list[int], count: int) -> list[int]:
    return reference_continuation(TARGET, prompt, count)


def test_nan_logits_fail_their_request_and_nobody_else() -> None:
    harness = Harness(make_core(scripted_model(nan_token=63), cache={"block_size": 4, "num_blocks": 256}))
    poisoned = request("nan", [5, 6, 7, 8, 9, 63], ignore_eos=True)
    others = [request(f"r{i}", prompt, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    results = harness.run([*others[:3], poisoned, *others[3:]])
    finish = results["nan"].finish
    assert finish is not None
    assert (finish.reason, results["nan"].token_ids) == ("error", [])
    assert "NaN" in finish.message
    for index, prompt in enumerate(PROMPTS):
        tokens = results[f"r{index}"].token_ids
        reference = expected(prompt, 16)
        assert tokens == reference or 63 in reference[:16]


def test_blocks_of_a_nan_request_do_not_poison_their_next_owner() -> None:
    """The pool is so small that the next requests get the poisoned blocks, with masked lanes in them."""
    model = scripted_model(nan_token=63, max_len=32)
    harness = Harness(make_core(model, cache={"block_size": 8, "num_blocks": 4}))
    harness.run([request("nan", [5] * 20 + [63], max_tokens=4)])
    prompt = [9, 8, 7]
    result = harness.run([request("next", prompt, max_tokens=8, ignore_eos=True)])["next"]
    reference = expected(prompt, 8)
    assert 63 not in reference
    assert result.token_ids == reference


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("failing_pass", [0, 3, 6])
def test_a_step_without_memory_fails_its_requests_and_nobody_else(
    failing_pass: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = itertools.count()
    forward = ScriptedTarget.forward

    def sometimes(self: ScriptedTarget, *arguments: Any) -> torch.Tensor:
        if next(passes) == failing_pass:
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")
        return forward(self, *arguments)

    core = make_core(
        scripted_model(),
        deferred=depth > 1,
        config={"max_steps_in_flight": depth},
        scheduler={"max_num_seqs": 2, "max_prefill_chunk": 4},
        cache={"block_size": 4, "num_blocks": 160, "enable_prefix_cache": False},
    )
    monkeypatch.setattr(ScriptedTarget, "forward", sometimes)
    requests = [request(f"r{index}", prompt, ignore_eos=True) for index, prompt in enumerate(PROMPTS)]
    results = Harness(core).run(requests)
    monkeypatch.undo()
    failed = [name for name, result in results.items() if result.finish and result.finish.reason == "error"]
    assert 1 <= len(failed) <= 2
    for index, prompt in enumerate(PROMPTS):
        finish, tokens = results[f"r{index}"].finish, results[f"r{index}"].token_ids
        assert finish is not None
        if f"r{index}" in failed:
            assert "no memory" in finish.message
        assert tokens == expected(prompt, 16)[: len(tokens)]
        assert len(tokens) == 16 or f"r{index}" in failed
    again = Harness(core).run([request("again", PROMPTS[0], ignore_eos=True)])
    assert again["again"].token_ids == expected(PROMPTS[0], 16)


@pytest.mark.parametrize("failing_row", [0, 1, 3])
def test_a_row_that_cannot_be_set_up_harms_no_step_behind_it(
    failing_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request in a failed step the device may know nothing, or what it knew of the row's last one."""
    calls = itertools.count()
    set_row = SamplingStates.set_row

    def sometimes(self: SamplingStates, new: NewRow) -> None:
        if next(calls) == failing_row:
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")
        set_row(self, new)

    monkeypatch.setattr(SamplingStates, "set_row", sometimes)
    core = make_core(
        scripted_model(),
        config={"max_steps_in_flight": 2},
        scheduler={"max_num_seqs": 2, "max_prefill_chunk": 4},
        cache={"block_size": 4, "num_blocks": 160},
    )
    results = Harness(core).run(
        [request(f"r{index}", prompt, ignore_eos=True) for index, prompt in enumerate(PROMPTS)]
    )
    failed = [name for name, result in results.items() if result.finish and result.finish.reason == "error"]
    assert 1 <= len(failed) <= 2
    for index, prompt in enumerate(PROMPTS):
        if f"r{index}" not in failed:
            assert results[f"r{index}"].token_ids == expected(prompt, 16)


def test_a_step_that_waits_for_the_host_fails_for_lack_of_memory_as_any_other() -> None:
    class Full:
        def launch_captured(self, plan: StepPlan) -> None:
            return None

        def launch_target(self, plan: StepPlan) -> None:
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    executor = SingleExecutor(cast(Any, Full()))
    entries = [ScheduledRequest(row=row, num_tokens=1, max_seq_len=8) for row in range(2)]
    handle = executor.launch(StepPlan(step=7, scheduled=entries, needs_host_inputs=True))
    executor.provide(handle, HostInputs())
    output = executor.collect(handle)
    assert (output.step, ["no memory" in row.failure for row in output.rows]) == (7, [True, True])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_at_random_steps_leave_the_others_and_the_pool_alone(seed: int, depth: int) -> None:
    generator = random.Random(seed)
    core = make_core(
        scripted_model(),
        deferred=True,
        config={"max_steps_in_flight": depth},
        scheduler={"max_num_seqs": 3, "max_prefill_chunk": 4},
        cache={"block_size": 4, "num_blocks": 160},
    )
    harness = Harness(core)
    for index, prompt in enumerate(PROMPTS):
        harness.add(request(f"r{index}", prompt, ignore_eos=True))
    victims = {f"r{generator.randrange(6)}" for _ in range(2)}
    when = {victim: generator.randrange(12) for victim in victims}
    step = 0
    while core.has_work:
        for victim in victims:
            if when[victim] == step:
                harness.abort(victim, victim, "unknown")
        harness.step()
        step += 1
    for index, prompt in enumerate(PROMPTS):
        result = harness.results[f"r{index}"]
        assert result.finish is not None
        reference = expected(prompt, 16)
        assert result.token_ids == reference[: len(result.token_ids)]
        if f"r{index}" not in victims:
            assert result.token_ids == reference


def test_the_core_refuses_what_cannot_run_and_goes_on() -> None:
    core = make_core(scripted_model(max_len=32), scheduler={"max_waiting": 2, "max_num_seqs": 1})
    harness = Harness(core)
    for bad, field in [
        (request("empty", []), "prompt"),
        (request("long", [3] * 32), "prompt"),
        (request("range", [3, 64]), "prompt"),
        (request("negative", [-1]), "prompt"),
        (request("hot", [3], temperature=float("nan")), "temperature"),
        (request("method", [3], method="eagle"), "speculation.method"),
        (request("choices", [3], constraint=Constraint(kind="choice")), "choice"),
        (request("grammar", [3], constraint=Constraint(kind="regex", text="a" * 65_537)), "regex"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            core.handle(bad)
        assert caught.value.field.startswith(field), bad.request_id
    harness.add(request("a", [3, 4]))
    with pytest.raises(InvalidRequestError, match="request_id"):
        core.handle(request("a", [5]))
    harness.add(request("b", [3, 4]))
    with pytest.raises(QueueFullError):
        core.handle(request("c", [3, 4]))
    results = harness.run()
    assert results["a"].token_ids == results["b"].token_ids == expected([3, 4], 16)


def test_part_b_waits_for_host_inputs_and_draws_only_allowed_tokens() -> None:
    core = make_core(scripted_model())
    executor = core._executor
    prompt = [5, 6, 7]
    plan = StepPlan(
        step=1,
        scheduled=[ScheduledRequest(row=0, num_tokens=3, start=0, max_seq_len=3)],
        new_rows=[
            NewRow(
                row=0,
                request_id="r",
                token_ids=prompt,
                num_prompt_tokens=3,
                num_computed_tokens=0,
                token_limit=10,
                params=request("r", prompt).params,
                stop_ids=(2,),
            )
        ],
        block_table_updates=[BlockTableUpdate(0, 0, 0, [3])],
        needs_host_inputs=True,
    )
    handle = executor.launch(plan)
    allowed = 40
    bits = np.zeros(2, dtype="<u4")
    bits[allowed // 32] = 1 << (allowed % 32)
    executor.provide(handle, HostInputs(token_bitmask=bits.tobytes()))
    assert executor.collect(handle).rows[0].token_ids == [allowed]
    assert torch.is_inference_mode_enabled() is False
