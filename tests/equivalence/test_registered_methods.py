"""Every registered draft method gives what plain decoding gives: tokens, logprobs, finish reason, usage.

The matrix runs over the registry: a method is tested from the day it is registered, on a target that it drafts for. The
oracle is the engine without speculation. The target is float64, so no near-tie decides. Every cell must have seen a
full, a partial and a zero acceptance: drafters that are never right, or always, would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from engine.config import SpeculatorConfig
from engine.core import EngineCore
from engine.messages import AddRequest, FinishInfo
from engine.spec_decode.registry import SPECULATORS
from tests.support.cpu_graphs import use_graphs
from tests.support.engine_harness import Harness, Result, request
from tests.support.tiny_drafters import (
    MAX_DRAFTS,
    MAX_MODEL_LEN,
    SETTINGS,
    TARGET_MAKERS,
    Workshop,
    families_of,
    shared_workshop,
)

ALONE = (2, 4, 9, 13)  # prompts that run one by one: those whose texts loop now and then


@dataclass(frozen=True)
class Layout:
    """`is_batch`: all requests at once, with mixed methods and k; else one after the other."""

    is_batch: bool
    depth: int
    block_size: int = 16
    chunk: int | None = None
    num_blocks: int | None = None

    def core(self, workshop: Workshop, configs: Sequence[SpeculatorConfig]) -> EngineCore:
        return workshop.core(
            configs,
            depth=self.depth,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_prefill_chunk=self.chunk,
        )


LAYOUTS = {
    "alone": Layout(is_batch=False, depth=1),
    "alone_two_in_flight": Layout(is_batch=False, depth=2, block_size=1, chunk=7),
    "batch": Layout(is_batch=True, depth=1, block_size=1, chunk=7),
    "batch_two_in_flight": Layout(is_batch=True, depth=2),
}
# Pairs of block size, chunk, memory and depth that the matrix has not; 192 tokens hold a few requests at a time.
MORE_LAYOUTS = {
    "preempted": Layout(is_batch=True, depth=1, block_size=16, num_blocks=12),
    "preempted_two_in_flight": Layout(is_batch=True, depth=2, block_size=1, chunk=7, num_blocks=192),
    "one_token_chunks": Layout(is_batch=True, depth=2, block_size=4, chunk=1),
}


@pytest.mark.parametrize("family", TARGET_MAKERS)
def test_plain_decoding_is_not_trivial(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    workshop = shared_workshop(tmp_path_factory, family)
    finishes = {
        setting: [result.finish for result in workshop.plain(setting).values()] for setting in SETTINGS
    }
    assert any(finish and finish.eos_token_id is not None for finish in finishes["min_tokens"])
    assert any(finish and finish.stop_string is not None for finish in finishes["stop_strings"])
    texts = {tuple(result.token_ids) for result in workshop.plain("greedy").values()}
    assert len(texts) == len(workshop.prompts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", SPECULATORS.names())
def test_output_equals_plain_decoding(method: str, setting: str, layout: str, workshop: Workshop) -> None:
    results = run(workshop, method, setting, LAYOUTS[layout])
    check_equals_plain(workshop, setting, results)
    check_acceptance_varied(method, results)


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
@pytest.mark.parametrize("method", SPECULATORS.names())
def test_preemption_and_tiny_chunks_change_nothing(method: str, layout: str, workshop: Workshop) -> None:
    results = run(workshop, method, "seeded", MORE_LAYOUTS[layout])
    check_equals_plain(workshop, "seeded", results)
    check_acceptance_varied(method, results)
    assert any(result.num_preemptions for result in results.values()) == (
        MORE_LAYOUTS[layout].num_blocks is not None
    )


@pytest.mark.parametrize(("depth", "block_size"), [(1, 16), (2, 1)])
@pytest.mark.parametrize("method", SPECULATORS.names())
def test_prefix_hits_change_nothing(method: str, depth: int, block_size: int, workshop: Workshop) -> None:
    """Twice the same, and hits are as long as without speculation."""
    core = workshop.core([workshop.drafter(method)], depth=depth, block_size=block_size)
    for _ in range(2):
        results = Harness(core).run(workshop.requests("greedy", [(method, 3)]))
        check_equals_plain(workshop, "greedy", results)
    for prompt, result in zip(workshop.prompts, results.values(), strict=True):
        num_hit_blocks = (len(prompt) - 1) // block_size
        assert result.num_cached_tokens == num_hit_blocks * block_size


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("method", SPECULATORS.names())
def test_each_k_proposes_at_most_k_and_changes_nothing(method: str, k: int, workshop: Workshop) -> None:
    core = workshop.core(
        [workshop.drafter(method)], depth=1 + k % 2, block_size=(1, 16)[k % 2], max_prefill_chunk=7
    )
    results = Harness(core).run(workshop.requests("greedy", [(method, k)]))
    check_equals_plain(workshop, "greedy", results)
    assert max(item.num_drafted for result in results.values() for item in result.spec) == k


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", SPECULATORS.names())
def test_the_end_is_exact_where_there_is_less_room_than_drafts(
    method: str, depth: int, workshop: Workshop
) -> None:
    """Prompts that leave 1 .. k + 2 tokens of the context, and requests of one or two tokens."""
    text = [*workshop.sequences[-1], *workshop.sequences[-1]]
    rooms = range(1, MAX_DRAFTS + 3)
    near_the_end = [(text[: MAX_MODEL_LEN - room], 99) for room in rooms]
    short = [(prompt, 1 + index % 2) for index, prompt in enumerate(workshop.prompts)]

    def run_with(method: str, configs: Sequence[SpeculatorConfig]) -> dict[str, Result]:
        requests = [
            request(f"r{index}", prompt, method=method, max_tokens=max_tokens, ignore_eos=True)
            for index, (prompt, max_tokens) in enumerate(near_the_end + short)
        ]
        return Harness(workshop.core(configs, depth=depth)).run(requests)

    plain = run_with("none", ())
    for (request_id, result), limit in zip(
        run_with(method, [workshop.drafter(method)]).items(),
        [*rooms, *(max_tokens for _, max_tokens in short)],
        strict=True,
    ):
        assert result.token_ids == plain[request_id].token_ids, request_id
        assert (len(result.token_ids), result.finish) == (limit, FinishInfo(reason="length")), request_id
        # One token is the prefill's, one the target's behind the drafts.
        assert all(item.num_drafted <= limit - 2 for item in result.spec), request_id


@pytest.mark.parametrize("chunk", [None, 7], ids=["whole_steps", "beside_chunks"])
@pytest.mark.parametrize("setting", ["greedy", "seeded"])
@pytest.mark.parametrize("method", SPECULATORS.names())
def test_captured_steps_change_nothing(
    method: str, setting: str, chunk: int | None, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole steps when all requests decode; beside chunks, the target's pass and the drafter's."""
    use_graphs(monkeypatch)
    core = workshop.core([workshop.drafter(method)], depth=2, max_prefill_chunk=chunk, max_num_seqs=5)
    results = Harness(core).run(workshop.requests(setting, [(method, 3), (method, 4), (method, 1)]))
    check_equals_plain(workshop, setting, results)
    check_acceptance_varied(method, results)


# ---- helpers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def workshop(method: str, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """With a target that the test's method drafts for."""
    return shared_workshop(tmp_path_factory, families_of(method)[0])


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A method that raises would lose its drafts, be logged, and otherwise go unseen."""
    yield
    assert not [record.getMessage() for record in caplog.records]


def run(workshop: Workshop, method: str, setting: str, layout: Layout) -> dict[str, Result]:
    other = "ngram" if method != "ngram" else "eagle"
    core = layout.core(workshop, [workshop.drafter(method), workshop.drafter(other)])
    if layout.is_batch:
        choices = [
            (method, 5),
            (method, 3),
            (other, 4),
            (method, 1),
            ("none", None),
            (method, 2),
            (method, 0),
            (method, 4),
        ]
        requests = workshop.requests(setting, choices)
        results = Harness(core).run(requests)
    else:
        every = workshop.requests(setting, [(method, 3)])
        requests = [every[index] for index in ALONE]
        results = {}
        for item in requests:
            results |= Harness(core).run([item])
    check_limits(requests, results)
    return results


def check_limits(requests: list[AddRequest], results: dict[str, Result]) -> None:
    """Drafts come from the method that was asked for, and are no more than asked for."""
    for item in requests:
        for observation in results[item.request_id].spec:
            assert observation.method == item.speculation.method
            assert observation.num_drafted <= (item.speculation.num_speculative_tokens or 0)


def check_equals_plain(workshop: Workshop, setting: str, results: dict[str, Result]) -> None:
    for request_id, result in results.items():
        plain = workshop.plain(setting)[request_id]
        assert result.token_ids == plain.token_ids, request_id
        assert result.finish == plain.finish, request_id
        assert len(result.logprobs) == len(plain.logprobs)
        for got, expected in zip(result.logprobs, plain.logprobs, strict=True):
            assert [got.token.token_id, *(entry.token_id for entry in got.top)] == [
                expected.token.token_id,
                *(entry.token_id for entry in expected.top),
            ]
            for one, other in zip([got.token, *got.top], [expected.token, *expected.top], strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert one.rank == other.rank


def check_acceptance_varied(method: str, results: dict[str, Result]) -> None:
    seen = [item for result in results.values() for item in result.spec if item.method == method]
    counts = [(item.num_verifier_accepted, item.num_drafted) for item in seen]
    assert any(accepted == drafted for accepted, drafted in counts), "no verification accepted all drafts"
    assert any(accepted == 0 for accepted, _ in counts), "no verification accepted none"
    assert any(0 < accepted < drafted for accepted, drafted in counts), "no verification accepted some"
