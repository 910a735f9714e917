"""A drafter's faults cost drafts of its own requests and nothing else: not the target's tokens, not other methods."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from engine.batch.request_rows import RequestRows
from engine.messages import AddRequest
from engine.sampling.draft_distributions import DraftDistributions
from engine.sampling.states import SamplingStates
from engine.spec_decode.speculator import BaseSpeculator, DraftTokens, ProposalInputs, SpeculatorNeeds
from engine.spec_decode.speculator_set import SpeculatorSet
from engine.step import NewRow, RowResult, StepPlan
from tests.support.engine_harness import Harness, make_core, request, scripted_model
from tests.support.scripted_speculators import PATTERNS, ScriptedSpeculator, StaleSpeculator
from tests.support.scripted_target import ScriptedTarget, reference_continuation

pytestmark = pytest.mark.drafter_fault

VOCAB = 64
K = 3
CPU = torch.device("cpu")
PROMPTS = [(5, 6, 7), (9, 8), (3,), (11, 12, 13, 14), (20, 21), (30, 31, 32)]
FUTURES = {prompt: reference_continuation(ScriptedTarget(VOCAB), list(prompt), 40) for prompt in PROMPTS}


class Broken(BaseSpeculator):
    """Raises in some of its calls, and proposes what is right in the others."""

    def __init__(self, is_broken: Callable[[int], bool] = lambda call: True) -> None:
        self._is_broken = is_broken
        self._healthy = ScriptedSpeculator(PATTERNS["oracle"], FUTURES)
        self.num_calls = 0

    def propose(self, inputs: ProposalInputs) -> DraftTokens:
        self.num_calls += 1
        if self._is_broken(self.num_calls - 1):
            raise RuntimeError("the drafter is broken")
        return self._healthy.propose(inputs)


class Fixed(BaseSpeculator):
    """Returns what it was given."""

    def __init__(self, token_ids: torch.Tensor, counts: torch.Tensor) -> None:
        self._drafts = DraftTokens(token_ids, counts)

    def propose(self, inputs: ProposalInputs) -> DraftTokens:
        return self._drafts


def make_inputs(
    methods: list[str], wanted: list[int], num_sampled: list[int] | None = None
) -> ProposalInputs:
    """One row per request, each with three known tokens."""
    num_reqs = len(methods)
    rows, states = RequestRows(num_reqs, 16, 4, CPU), SamplingStates(num_reqs, VOCAB, CPU)
    for row in range(num_reqs):
        new = NewRow(
            row=row,
            request_id=str(row),
            token_ids=[1, 2, 3],
            num_prompt_tokens=2,
            num_computed_tokens=2,
            token_limit=16,
            params=request("r", [1]).params,
            stop_ids=(),
        )
        rows.set_row(new)
    return ProposalInputs(
        row_list=list(range(num_reqs)),
        methods=methods,
        wanted=wanted,
        num_wanted=torch.tensor(wanted),
        rows=torch.arange(num_reqs),
        attention=cast(Any, _Attention(num_reqs)),
        request_rows=rows,
        states=states,
        hidden_states=torch.zeros(num_reqs, 1),
        aux_hidden_states={},
        num_sampled=torch.tensor(num_sampled or [1] * num_reqs),
        num_rejected=torch.zeros(num_reqs, dtype=torch.int64),
    )


class _Attention:
    """As much of AttentionInputs as selecting requests needs."""

    def __init__(self, num_reqs: int) -> None:
        self.query_lens = [1] * num_reqs

    def select(self, requests: list[int], index: torch.Tensor, tokens: torch.Tensor) -> _Attention:
        return _Attention(len(requests))


def drafts_of(rows: RequestRows) -> list[list[int]]:
    """What stands behind the known tokens of each row."""
    return [
        rows.token_history[row, 3 : 3 + int(rows.num_drafts[row])].tolist()
        for row in range(rows.max_num_rows)
    ]


# ---- the set alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_uniform", [False, True])
def test_distributions_of_earlier_drafts_are_forgotten_before_others_are_made(is_uniform: bool) -> None:
    """A draft that was not sampled must not be judged by what the draft before it, in its place, was drawn from."""
    distributions = DraftDistributions(2, K, VOCAB, torch.float32, CPU)
    rows, steps = torch.tensor([0, 1]), torch.tensor([0, 0])
    distributions.record(rows, steps, torch.full((2, VOCAB), 1 / VOCAB), torch.tensor([True, True]))
    inputs = replace(make_inputs(["any"] * 2, [1, 1]), draft_distributions=distributions)
    speculators = SpeculatorSet({"any": Fixed(torch.tensor([[10], [11]]), torch.tensor([1, 1]))}, VOCAB)
    if is_uniform:
        speculators.propose_uniformly("any", inputs)
    else:
        speculators.propose(inputs)
    one_hot = torch.nn.functional.one_hot(torch.tensor([10, 11]), VOCAB).float()
    assert torch.equal(distributions.take(rows, steps, torch.tensor([10, 11])), one_hot)


def test_only_leading_tokens_within_vocabulary_and_wish_are_kept() -> None:
    proposals = [
        ([10, 11, 12], 3, 3, [10, 11, 12], False),
        ([10, -1, 12], 3, 3, [10], True),  # unusable logits
        ([VOCAB, 11, 12], 3, 3, [], True),
        ([10, 11, VOCAB], 3, 2, [10, 11], False),  # more than wanted: what is not wanted may be anything
        ([10, 11, -1], 2, 3, [10, 11], False),  # fewer than wanted is no fault
        ([10, 11, 12], 0, 3, [], False),
        ([10, 11, 12], 3, 0, [], False),
        ([10, 11, 12], 9, 9, [10, 11, 12], True),  # claims more than it brought
        ([-(2**40), 2**40, 0], 3, 3, [], True),
    ]
    inputs = make_inputs(["any"] * len(proposals), [wanted for _, _, wanted, _, _ in proposals])
    speculator = Fixed(
        torch.tensor([token_ids for token_ids, *_ in proposals]),
        torch.tensor([count for _, count, *_ in proposals]),
    )
    drafts = SpeculatorSet({"any": speculator}, VOCAB).propose(inputs)
    assert drafts_of(inputs.request_rows) == [expected for *_, expected, _ in proposals]
    assert drafts.num_draft_tokens.tolist() == [len(expected) for *_, expected, _ in proposals]
    assert drafts.is_bad.tolist() == [is_bad for *_, is_bad in proposals]
    assert drafts.has_failed == [False] * len(proposals)


def test_request_that_emitted_nothing_yet_gets_no_drafts() -> None:
    inputs = make_inputs(["any", "any"], [2, 2], num_sampled=[0, 1])
    speculator = Fixed(torch.tensor([[4, -1], [5, 6]]), torch.tensor([2, 2]))
    drafts = SpeculatorSet({"any": speculator}, VOCAB).propose(inputs)
    assert drafts_of(inputs.request_rows) == [[], [5, 6]]
    assert drafts.is_bad.tolist() == [False, False]


@pytest.mark.parametrize("order", [("bad", "good"), ("good", "bad")])
def test_method_that_raises_leaves_the_drafts_of_others(
    order: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    speculators = {"bad": Broken(), "good": Fixed(torch.tensor([[4, 5], [6, 7]]), torch.tensor([2, 1]))}
    subject = SpeculatorSet({name: speculators[name] for name in order}, VOCAB)
    inputs = make_inputs(["bad", "good", "none", "good", "bad"], [2] * 5)
    with caplog.at_level(logging.ERROR):
        drafts = subject.propose(inputs)
        subject.propose(inputs)
    assert drafts_of(inputs.request_rows) == [[], [4, 5], [], [6], []]
    assert drafts.has_failed == [True, False, False, False, True]
    assert drafts.is_bad.tolist() == [False] * 5
    assert subject.num_failures == {("bad", "RuntimeError"): 2}
    (record,) = caplog.records
    assert "bad" in record.getMessage()
    assert record.exc_info is not None, "the log has no traceback"


def test_each_kind_of_exception_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Changing(BaseSpeculator):
        faults = [ValueError("first"), KeyError("second"), ValueError("third")]

        def propose(self, inputs: ProposalInputs) -> DraftTokens:
            raise self.faults.pop(0)

    subject = SpeculatorSet({"bad": Changing()}, VOCAB)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            subject.propose(make_inputs(["bad"], [1]))
    assert subject.num_failures == {("bad", "ValueError"): 2, ("bad", "KeyError"): 1}
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("shape", "count"), [((2, 2), 3), ((3, 2), 2), ((3,), 3), ((3, 2, 1), 3)], ids=str)
def test_drafts_of_another_shape_are_a_fault_of_the_method(shape: tuple[int, ...], count: int) -> None:
    subject = SpeculatorSet({"bad": Fixed(torch.ones(shape, dtype=torch.int64), torch.ones(count))}, VOCAB)
    drafts = subject.propose(make_inputs(["bad"] * 3, [2] * 3))
    assert drafts.has_failed == [True] * 3
    assert drafts.num_draft_tokens.tolist() == [0, 0, 0]
    assert subject.num_failures == {("bad", "ValueError"): 1}


def test_stopping_the_process_is_no_fault_of_a_drafter() -> None:
    class Interrupted(BaseSpeculator):
        def propose(self, inputs: ProposalInputs) -> DraftTokens:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SpeculatorSet({"bad": Interrupted()}, VOCAB).propose(make_inputs(["bad"], [1]))


def test_needs_are_those_of_all_methods() -> None:
    first, second = Broken(), Broken()
    first.needs = SpeculatorNeeds(aux_layers=(7, 2))
    second.needs = SpeculatorNeeds(aux_layers=(2, 3))
    assert SpeculatorSet({"a": first, "b": second}, VOCAB).needs.aux_layers == (2, 3, 7)


# ---- in the engine -------------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[], BaseSpeculator]] = {
    "always_raises": Broken,
    "raises_now_and_then": lambda: Broken(lambda call: call % 3 == 1),
    "raises_first": lambda: Broken(lambda call: call == 0),
    "stale": lambda: StaleSpeculator(ScriptedSpeculator(PATTERNS["oracle"], FUTURES)),
    **{
        name: lambda name=name: ScriptedSpeculator(PATTERNS[name], FUTURES)  # type: ignore[misc]
        for name in ("minus_one", "outside_vocabulary", "fewer_than_k", "nothing")
    },
}


class Recorder:
    """Keeps every row of every step's result, by request."""

    def __init__(self, harness: Harness) -> None:
        self.rows: dict[str, list[RowResult]] = {}
        scheduler = harness.core._scheduler
        complete = scheduler.complete

        def wrapped(plan: StepPlan, output: Any) -> Any:
            for new in plan.new_rows:
                self._ids[new.row] = new.request_id
            for entry, result in zip(plan.scheduled, output.rows, strict=True):
                self.rows.setdefault(self._ids[entry.row], []).append(result)
            return complete(plan, output)

        self._ids: dict[int, str] = {}
        scheduler.complete = wrapped  # type: ignore[method-assign]


def requests_of(methods: list[str]) -> list[AddRequest]:
    return [
        request(f"{method}-{index}", prompt, method=method, max_tokens=24, ignore_eos=True)
        for index, (prompt, method) in enumerate(zip(PROMPTS, methods * 6, strict=False))
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("methods", [["bad"], ["bad", "good"], ["good", "bad", "none"]], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_drafters_change_no_token_and_no_other_method(
    fault: str, methods: list[str], depth: int
) -> None:
    core = make_core(
        scripted_model(),
        speculators={"bad": FAULTS[fault](), "good": ScriptedSpeculator(PATTERNS["oracle"], FUTURES)},
        k=K,
        deferred=depth > 1,
        config={"max_steps_in_flight": depth},
        scheduler={"max_prefill_chunk": 2},
    )
    harness = Harness(core)
    recorder = Recorder(harness)
    results = harness.run(requests_of(methods))
    for index, (request_id, result) in enumerate(results.items()):
        assert result.token_ids == FUTURES[PROMPTS[index]][:24]
        rows = recorder.rows[request_id]
        if request_id.startswith("good"):
            assert result.spec
            assert all(seen.num_verifier_accepted == seen.num_drafted for seen in result.spec)
        if not request_id.startswith("bad"):
            assert not any(row.nan_draft or row.drafter_error for row in rows)
            continue
        emitting = [row for row in rows if row.token_ids]
        assert all(row.drafter_error for row in rows) == (fault == "always_raises")
        assert any(row.drafter_error for row in rows) == ("raises" in fault)
        assert any(row.nan_draft for row in emitting) == (fault in ("minus_one", "outside_vocabulary"))
        assert bool(result.spec) == (fault not in ("always_raises", "minus_one", "nothing"))


def test_failed_rows_are_counted_as_not_drafted() -> None:
    core = make_core(scripted_model(), speculators={"bad": Broken()}, k=K)
    core.handle(requests_of(["bad"])[0])
    counts: dict[str, int] = {}
    while core.has_work:
        message = core.step()
        assert message is not None
        assert message.step is not None
        for reason, count in message.step.not_drafted.items():
            counts[reason] = counts.get(reason, 0) + count
    assert counts.keys() <= {"drafter_error", "limit"}
    assert counts["drafter_error"] >= 20
