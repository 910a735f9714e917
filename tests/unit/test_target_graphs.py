"""Decode steps through static buffers: padded, replayed, and the same tokens. Recorded on CPU by running again.

That real graphs replay, with the kernels, is tested on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.assembly import assemble
from engine.config import CudaGraphsName, ModelConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.cudagraph import (
    BatchDescriptor,
    BatchLimits,
    CaptureQueue,
    CudaGraphManager,
    sizes_up_to,
    smallest_size,
)
from engine.errors import ConfigError
from engine.kv_spec import PAD_SLOT_ID
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.models.loader import LoadedModel, load_model
from engine.spec_decode.cudagraph_managers import (
    DecodeSpeculatorCudaGraphManager,
    LoopDescriptor,
    PrefillSpeculatorCudaGraphManager,
)
from engine.step import ScheduledRequest
from engine.worker.graph_setup import launch_bound_tokens
from engine.worker.graphs import TargetGraphManager
from engine.worker.step_graphs import StepDescriptor, StepGraphs
from tests.support.cpu_graphs import use_graphs
from tests.support.engine_harness import DeferredExecutor, Harness, request
from tests.support.tiny_models import make_tiny_checkpoint

CPU = torch.device("cpu")
MAX_NUM_SEQS = 6
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9] * 3, list(range(20, 45)), [30, 31, 30, 31, 30], [8]]


class PoisonedTarget(TargetGraphManager):
    """Before each replay, what is behind the batch holds the last batch's leftovers, or worse."""

    num_replays = 0

    def replay(self, descriptor: BatchDescriptor) -> None:
        inputs = self._attention.view(num_tokens=self._limits.num_tokens, num_reqs=1, max_query_len=1)
        is_padding = inputs.slot_mappings[0] == PAD_SLOT_ID
        self._input_ids[is_padding] = 3
        inputs.positions[is_padding] = 40
        super().replay(descriptor)
        PoisonedTarget.num_replays += 1


class PoisonedSteps(StepGraphs):
    """Likewise; and which shapes were replayed."""

    replayed: ClassVar[list[StepDescriptor]] = []

    def step(self, descriptor: StepDescriptor, scheduled: Sequence[ScheduledRequest]) -> torch.Tensor:
        self._inputs.fill_(3)
        PoisonedSteps.replayed.append(descriptor)
        return super().step(descriptor, scheduled)


class PoisonedDraftPrefill(PrefillSpeculatorCudaGraphManager):
    """Likewise."""

    num_replays = 0

    def replay(self, descriptor: BatchDescriptor) -> None:
        inputs = self._attention.view(num_tokens=self._limits.num_tokens, num_reqs=1, max_query_len=1)
        self._input_ids[inputs.slot_mappings[0] == PAD_SLOT_ID] = 3
        super().replay(descriptor)
        PoisonedDraftPrefill.num_replays += 1


class PoisonedDraftLoop(DecodeSpeculatorCudaGraphManager):
    """Likewise."""

    num_replays = 0

    def replay(self, descriptor: LoopDescriptor) -> None:
        is_padding = self._rows == self._padding_row
        self._num_wanted[is_padding] = self._num_sampled[is_padding] = 1
        super().replay(descriptor)
        PoisonedDraftLoop.num_replays += 1


@pytest.fixture(scope="module", params=["gemma3_text"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, dtype="float32")


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(ModelConfig(model=str(checkpoint)), device=CPU)


def run(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    *,
    speculators: tuple[SpeculatorConfig, ...] = (),
    depth: int = 1,
    mode: CudaGraphsName = "full",
    chunk: int | None = None,
    max_tokens: int = 6,
    **params: Any,
) -> list[StepDescriptor]:
    """Tokens and accepted drafts are those without graphs. Returns the whole steps that were replayed."""

    def make_core(mode: CudaGraphsName) -> EngineCore:
        config = engine_config(
            model={"model": "test"},
            device="cpu",
            max_model_len=64,
            max_steps_in_flight=depth,
            speculators=speculators,
            draft_policy="first",
            cuda_graphs=mode,
            scheduler={"max_num_seqs": MAX_NUM_SEQS, "check_invariants": True, "max_prefill_chunk": chunk},
            cache={"block_size": 4, "num_blocks": 64},
        )
        wrap = DeferredExecutor if depth > 1 else (lambda executor: executor)
        return EngineCore(config, build=lambda c, _: assemble(c, loaded, device=CPU, wrap_executor=wrap))

    requests = [
        request(f"r{index}", prompt, max_tokens=max_tokens + index, ignore_eos=True, **params)
        for index, prompt in enumerate(PROMPTS)
    ]
    plain = Harness(make_core("none")).run(requests)
    PoisonedTarget.num_replays, PoisonedSteps.replayed = 0, []
    PoisonedDraftPrefill.num_replays = PoisonedDraftLoop.num_replays = 0
    with monkeypatch.context() as patched:
        use_graphs(patched)
        patched.setattr("engine.worker.graph_setup.TargetGraphManager", PoisonedTarget)
        patched.setattr("engine.worker.model_runner.StepGraphs", PoisonedSteps)
        drafting = "engine.spec_decode.autoregressive"
        patched.setattr(f"{drafting}.PrefillSpeculatorCudaGraphManager", PoisonedDraftPrefill)
        patched.setattr(f"{drafting}.DecodeSpeculatorCudaGraphManager", PoisonedDraftLoop)
        core = make_core(mode)
    results = Harness(core).run(requests)
    assert {name: (result.token_ids, result.spec) for name, result in results.items()} == {
        name: (result.token_ids, result.spec) for name, result in plain.items()
    }
    return PoisonedSteps.replayed


NGRAM = SpeculatorConfig(method="ngram", k=2, options={"min_n": "1"})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({}, "greedy"),
        ({"temperature": 0.8, "seed": 3}, "random"),
        ({"temperature": 0.8, "top_k": 20, "min_p": 0.01, "seed": 3}, "truncated"),
    ],
    ids=["greedy", "random", "truncated"],
)
def test_uniform_decodes_replay_whole_steps(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, depth: int, params: dict[str, Any], kind: str
) -> None:
    replayed = run(loaded, monkeypatch, depth=depth, **params)
    assert len(replayed) >= 5
    assert {step.sampling for step in replayed} >= {kind}
    assert {step.num_drafts for step in replayed} == {0}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=["greedy", "truncated"]
)
@pytest.mark.parametrize("method", ["ngram", "draft_model", "suffix"])
def test_steps_with_drafts_are_whole_steps_too(
    loaded: LoadedModel,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    depth: int,
    params: dict[str, Any],
) -> None:
    speculator = NGRAM if method == "ngram" else SpeculatorConfig(method=method, k=3)
    if method == "draft_model":
        speculator = speculator.model_copy(update={"model": str(checkpoint)})
    replayed = run(loaded, monkeypatch, speculators=(speculator,), depth=depth, max_tokens=24, **params)
    assert replayed
    if method == "suffix":  # it drafts on the host: on the device, its drafts are verified and none are made
        assert {step.method for step in replayed} == {"none"}
    else:
        assert {(step.method, step.num_drafts) for step in replayed} >= {(method, speculator.k)}


def test_steps_that_need_more_of_the_sampler_replay_the_target(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not run(loaded, monkeypatch, speculators=(NGRAM,), presence_penalty=0.5, logprobs=2)
    assert PoisonedTarget.num_replays >= 3


def test_chunks_are_replayed_only_in_full_mode(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for mode in ("full", "full_decode"):
        run(loaded, monkeypatch, mode=mode, chunk=3)
        counts[mode] = PoisonedTarget.num_replays
    assert counts["full"] > counts["full_decode"]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "random"])
def test_drafting_beside_prompt_chunks_replays_graphs_of_its_own(
    loaded: LoadedModel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    speculator = SpeculatorConfig(method="draft_model", model=str(checkpoint), k=2)
    run(loaded, monkeypatch, speculators=(speculator,), depth=2, chunk=3, **params)
    assert PoisonedDraftPrefill.num_replays >= 2
    assert PoisonedDraftLoop.num_replays >= 2


def test_a_batch_with_one_request_beyond_the_captured_context_launches_passes_and_drafts(
    loaded: LoadedModel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block tables of a graph end there."""
    monkeypatch.setattr("engine.worker.graph_setup.MAX_GRAPH_CONTEXT", 10)  # prompts have 1 to 25 tokens
    speculator = SpeculatorConfig(method="draft_model", model=str(checkpoint), k=2)
    run(loaded, monkeypatch, speculators=(speculator,), presence_penalty=0.5, max_tokens=12)
    run(loaded, monkeypatch, speculators=(speculator,), max_tokens=12, chunk=3)
    assert PoisonedTarget.num_replays + PoisonedDraftLoop.num_replays > 0, "short ones replay"


class Manager(CudaGraphManager[BatchDescriptor]):
    def __init__(self, captures: CaptureQueue) -> None:
        super().__init__(captures)
        self.ran: list[BatchDescriptor] = []

    def run(self, descriptor: BatchDescriptor) -> None:
        self.ran.append(descriptor)


def shape(num_tokens: int, max_query_len: int = 1, *, has_chunks: bool = False) -> BatchDescriptor:
    return BatchDescriptor(
        num_tokens=num_tokens, num_reqs=num_tokens, max_query_len=max_query_len, has_chunks=has_chunks
    )


def test_a_batch_runs_as_the_cheapest_captured_shape_that_holds_it() -> None:
    captures = CaptureQueue(lambda run: run)
    manager = Manager(captures)
    assert manager.dispatch(shape(2)) is None  # nothing is captured yet
    captures.plan(manager, [shape(8), shape(4)])
    while captures.capture_next():
        pass
    assert manager.dispatch(shape(2)) == shape(2)  # it had been asked for
    assert manager.dispatch(shape(3)) == shape(4)
    assert manager.dispatch(shape(5)) == shape(8)
    assert manager.dispatch(shape(9)) is None
    assert manager.dispatch(shape(2, max_query_len=2)) is None
    assert manager.dispatch(shape(2, has_chunks=True)) is None
    assert manager.ran == []
    manager.replay(shape(4))
    assert manager.ran == [shape(4)]


def test_while_requests_run_one_shape_a_second_is_captured() -> None:
    now = 100.0
    captures = CaptureQueue(lambda run: run, clock=lambda: now)
    manager = Manager(captures)
    for size in (1, 2, 4):
        manager.dispatch(shape(size))
        manager.dispatch(shape(size))  # asking twice is asking once
    num_captured = []
    for now in (100.0, 100.5, 101.0, 101.9, 102.1, 110.0):  # noqa: B007 - read by the clock
        captures.capture_asked()
        num_captured.append(sum(manager.dispatch(shape(size)) == shape(size) for size in (1, 2, 4)))
    assert num_captured == [1, 1, 2, 2, 3, 3]
    assert not captures.capture_asked()


def test_what_the_last_step_asked_for_is_captured_first_and_the_whole_before_its_parts() -> None:
    """A load that grew to three rows does not wait for the sizes on its way."""
    now = 0.0

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    captures = CaptureQueue(record, clock=lambda: now)
    manager = Manager(captures)

    def step(*sizes: int) -> bool:
        is_captured = captures.capture_asked()
        for size in sizes:
            manager.dispatch(shape(size))
        return is_captured

    assert [step(9), step()] == [False, True]
    for size in (1, 2, 3, 4, 3):
        assert not step(size, 10 * size), "the last capture is too short ago"
    now = 1.0
    assert step(3, 30)
    now = 2.0
    assert step()
    now = 3.0
    assert not step(), "nothing is asked for any more"
    assert [descriptor.num_tokens for descriptor in manager.ran] == [9, 3, 30]
    while captures.capture_next():
        pass
    assert [descriptor.num_tokens for descriptor in manager.ran] == [9, 3, 30, 4, 40, 2, 20, 1, 10]


def test_what_shapes_launch_is_compiled_together_at_the_start_and_each_by_itself_when_idle() -> None:
    """Never between two steps, which would wait for the pass that tells what is launched."""
    events: list[str] = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        events.append("captured")
        return run

    def compile_ahead(run: Callable[[], None]) -> None:
        already = len(manager.ran)
        run()
        events.append("compiled " + " ".join(str(shape.num_tokens) for shape in manager.ran[already:]))

    captures = CaptureQueue(record, compile_ahead=compile_ahead)
    manager = Manager(captures)
    captures.plan(manager, [shape(1), shape(2), shape(4)])
    manager.dispatch(shape(3))  # by nobody: there was no request yet
    captures.capture_first(2)
    assert events == ["compiled 1 2", "captured", "captured"]
    manager.dispatch(shape(8))
    assert captures.capture_next()
    assert captures.capture_next()
    assert not captures.capture_next()
    assert events[3:] == ["compiled 8", "captured", "compiled 4", "captured"]
    captures = CaptureQueue(record, compile_ahead=compile_ahead)
    manager = Manager(captures)
    captures.capture_first(2)  # there is none
    manager.dispatch(shape(8))
    assert captures.capture_asked()
    assert events[7:] == ["captured"]


def test_a_shape_that_finds_no_memory_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(run: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    captures = CaptureQueue(refuse)
    manager = Manager(captures)
    assert manager.dispatch(shape(1)) is None
    assert captures.capture_next()
    assert "no memory to capture" in caplog.text
    assert manager.dispatch(shape(1)) is None
    assert not captures.capture_next()


def test_sizes_are_whole_steps_up_to_the_limit() -> None:
    assert sizes_up_to(20) == [1, 2, 4, 8, 16, 20]
    assert [smallest_size(count, 20) for count in (1, 3, 9, 17, 20)] == [1, 4, 16, 20, 20]


@pytest.mark.parametrize(("size", "expected"), [(1000, 24000), (8000, 375)])
def test_chunks_are_captured_while_their_launches_take_longer_than_their_products(
    size: int, expected: int
) -> None:
    layers = [
        Linear(size, [("a", size)], bias=False, dtype=torch.float32, device=torch.device("meta"))
        for _ in range(3)
    ]
    table = TokenEmbedding(10**6, size, dtype=torch.float32, device=torch.device("meta"))
    assert launch_bound_tokens(nn.Sequential(*layers, table)) == expected
    assert launch_bound_tokens(nn.Identity()) == 0


@pytest.mark.parametrize("chunk_tokens", [0, 5, 64])
def test_decodes_are_captured_for_all_rows_whatever_chunks_may_have(chunk_tokens: int) -> None:
    limits = BatchLimits(num_reqs=5, max_seq_len=100, decode_query_len=3, chunk_tokens=chunk_tokens)
    decodes = BatchDescriptor(num_tokens=15, num_reqs=5, max_query_len=3, has_chunks=False)
    assert limits.describe([3] * 5, [100] * 5, False) == decodes
    assert limits.describe([3] * 5, [100, 101, 1, 1, 1], False) is None
    chunks = limits.describe([3] * 3, [100] * 3, True)
    if chunk_tokens < 9:
        assert chunks is None
    else:
        assert chunks == BatchDescriptor(num_tokens=16, num_reqs=5, max_query_len=16, has_chunks=True)


def test_graphs_that_are_asked_for_where_there_are_none_are_an_error(loaded: LoadedModel) -> None:
    config = engine_config(model={"model": "test"}, device="cpu", cuda_graphs="full_decode")
    with pytest.raises(ConfigError, match="cuda_graphs: got 'full_decode'"):
        assemble(config, loaded, device=CPU)
