"""Decode steps through static buffers: padded, replayed, and the same tokens. Recorded on CPU by running again.

The kernels run in Triton's interpreter; that real graphs replay is tested on the GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.assembly import assemble
from engine.config import ModelConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.cudagraph import BatchDescriptor, CudaGraphManager, decode_descriptors
from engine.errors import ConfigError
from engine.models.loader import LoadedModel, load_model
from engine.worker.decode_graphs import DecodeStepGraphs
from engine.worker.graphs import TargetGraphManager
from tests.support.engine_harness import DeferredExecutor, Harness, request
from tests.support.tiny_models import make_tiny_checkpoint

CPU = torch.device("cpu")
MAX_NUM_SEQS = 6
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9] * 3, list(range(20, 45)), [30, 31, 30, 31, 30], [8]]


class PoisonedTarget(TargetGraphManager):
    """Before each replay, what is behind the batch holds the last batch's leftovers, or worse."""

    num_replays = 0

    def _fill(self, batch: Any, descriptor: BatchDescriptor) -> None:
        num_tokens = len(batch.input_ids)
        self._input_ids[num_tokens:].fill_(3)
        self._positions[num_tokens:].fill_(40)
        super()._fill(batch, descriptor)
        PoisonedTarget.num_replays += 1


class CountedSteps(DecodeStepGraphs):
    num_replays = 0

    def step(self, descriptor: BatchDescriptor, row_list: list[int]) -> torch.Tensor:
        CountedSteps.num_replays += 1
        return super().step(descriptor, row_list)


@pytest.fixture(scope="module", params=["gemma3_text"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, dtype="float32")
    return load_model(ModelConfig(model=str(path)), device=CPU)


def run(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, *, k: int, depth: int = 1, **params: Any
) -> None:
    """The tokens are those of the same engine without graphs."""

    def make_core() -> EngineCore:
        config = engine_config(
            model={"model": "test"},
            device="cpu",
            attention_backend="triton",
            max_model_len=64,
            max_steps_in_flight=depth,
            speculators=(SpeculatorConfig(method="ngram", k=k, options={"min_n": "1"}),) if k else (),
            scheduler={"max_num_seqs": MAX_NUM_SEQS, "check_invariants": True},
            cache={"block_size": 4, "num_blocks": 64},
        )
        wrap = DeferredExecutor if depth > 1 else (lambda executor: executor)
        return EngineCore(config, build=lambda c, _: assemble(c, loaded, device=CPU, wrap_executor=wrap))

    requests = [
        request(f"r{index}", prompt, max_tokens=7 + index, ignore_eos=True, **params)
        for index, prompt in enumerate(PROMPTS)
    ]
    plain = Harness(make_core()).run(requests)
    PoisonedTarget.num_replays = CountedSteps.num_replays = 0
    with monkeypatch.context() as patched:
        patched.setattr("engine.assembly._make_recorder", lambda *arguments: lambda run: run)
        patched.setattr("engine.assembly.TargetGraphManager", PoisonedTarget)
        patched.setattr("engine.worker.model_runner.DecodeStepGraphs", CountedSteps)
        core = make_core()
    results = Harness(core).run(requests)
    assert {name: result.token_ids for name, result in results.items()} == {
        name: result.token_ids for name, result in plain.items()
    }


def test_verifications_replay_the_target(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run(loaded, monkeypatch, k=2)
    assert PoisonedTarget.num_replays >= 5


def test_sampled_requests_replay_the_target(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run(loaded, monkeypatch, k=0, temperature=0.8, seed=3)
    assert PoisonedTarget.num_replays >= 5
    assert CountedSteps.num_replays == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_requests_replay_whole_steps(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    run(loaded, monkeypatch, k=0, depth=depth)
    assert CountedSteps.num_replays >= 5


def test_the_smallest_shape_that_fits_is_chosen() -> None:
    class Manager(CudaGraphManager):
        def run(self, descriptor: BatchDescriptor) -> None:
            ran.append(descriptor)

    ran: list[BatchDescriptor] = []
    manager = Manager(decode_descriptors(max_num_seqs=10, max_drafts=3), recorder=lambda run: run)
    assert manager.dispatch(1, 1, 1) is None  # nothing is captured yet
    manager.capture()
    assert manager.dispatch(1, 1, 1) == BatchDescriptor(1, 1, 1)
    assert manager.dispatch(3, 3, 1) == BatchDescriptor(4, 4, 1)
    assert manager.dispatch(9, 9, 1) == BatchDescriptor(10, 10, 1)
    assert manager.dispatch(3, 1, 3) == BatchDescriptor(4, 4, 4)
    assert manager.dispatch(40, 10, 4) == BatchDescriptor(40, 10, 4)
    assert manager.dispatch(41, 10, 4) is None
    assert manager.dispatch(2, 1, 5) is None
    assert ran == []
    manager.replay(BatchDescriptor(4, 4, 1))
    assert ran == [BatchDescriptor(4, 4, 1)]


def test_graphs_that_are_asked_for_where_there_are_none_are_an_error(loaded: LoadedModel) -> None:
    config = engine_config(model={"model": "test"}, device="cpu", cuda_graphs="full_decode")
    with pytest.raises(ConfigError, match="cuda_graphs: got 'full_decode'"):
        assemble(config, loaded, device=CPU)
