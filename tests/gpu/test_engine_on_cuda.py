"""The engine on a CUDA device: the same tokens as transformers, with either attention backend, one or two steps in
flight, drafts or none, and no host sync between launches."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.assembly import assemble
from engine.config import EngineConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.cudagraph import CudaGraphManager
from engine.executor import Executor, StepHandle
from engine.models.loader import load_model
from engine.step import HostInputs, StepOutput, StepPlan
from tests.support.engine_harness import Harness, request
from tests.support.tiny_models import TINY_MODEL_TYPES, make_tiny_checkpoint

pytestmark = pytest.mark.gpu
MAX_TOKENS = 48


class SyncFreeExecutor(Executor):
    """Launching a step with torch's sync detector armed: any wait of the host is an error."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def launch(self, plan: StepPlan) -> StepHandle:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls the detector a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            return self._inner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def provide(self, handle: StepHandle, inputs: HostInputs) -> None:
        self._inner.provide(handle, inputs)

    def collect(self, handle: StepHandle) -> StepOutput:
        return self._inner.collect(handle)

    def prepare(self) -> bool:
        return self._inner.prepare()


@pytest.fixture(scope="module", params=TINY_MODEL_TYPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, dtype="float32")


def make_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (5 + 7 * index,), generator=generator).tolist() for index in range(count)]


def make_cuda_core(
    checkpoint: Path,
    *,
    backend: str,
    depth: int = 1,
    speculators: tuple[SpeculatorConfig, ...] = (),
    sync_free: bool = False,
    dtype: str = "float32",
    graphs: str = "auto",
    **scheduler: Any,
) -> EngineCore:
    device = torch.device("cuda")
    settings = engine_config(
        model={"model": str(checkpoint), "dtype": dtype},
        speculators=speculators,
        draft_policy="first",
        attention_backend=backend,
        max_steps_in_flight=depth,
        cuda_graphs=graphs,
        scheduler={"max_num_seqs": 8, "max_prefill_stall": None, "check_invariants": True, **scheduler},
        cache={"block_size": 16, "num_blocks": 512},
    )

    def build(config: EngineConfig, on_progress: Any) -> Any:
        loaded = load_model(config.model, device=device)
        wrap = SyncFreeExecutor if sync_free else (lambda executor: executor)
        return assemble(config, loaded, device=device, wrap_executor=wrap)

    return EngineCore(settings, build=build)


def run(core: EngineCore, **params: Any) -> dict[str, list[int]]:
    requests = [
        request(f"r{index}", prompt, max_tokens=MAX_TOKENS, ignore_eos=True, **params)
        for index, prompt in enumerate(make_prompts(8))
    ]
    return {name: result.token_ids for name, result in Harness(core).run(requests).items()}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_greedy_tokens_equal_transformers(checkpoint: Path, backend: str, depth: int) -> None:
    tokens = run(make_cuda_core(checkpoint, backend=backend, depth=depth, max_prefill_chunk=24))
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()
    for index, prompt in enumerate(make_prompts(8)):
        ids = torch.tensor([prompt], device="cuda")
        output = model.generate(
            ids, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        assert tokens[f"r{index}"] == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("num_seqs", [3, 8], ids=["padded", "largest"])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "suffix"])
def test_graphs_do_not_change_the_tokens(
    checkpoint: Path,
    method: str | None,
    params: dict[str, Any],
    num_seqs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole steps, also with drafts; and beside prompt chunks the target's and the drafter's passes."""
    model = str(checkpoint) if method == "draft_model" else None
    speculators = () if method is None else (SpeculatorConfig(method=method, model=model, k=4),)
    settings: dict[str, Any] = {"backend": "triton", "speculators": speculators, "max_prefill_chunk": 16}
    expected = run(make_cuda_core(checkpoint, graphs="none", **settings), **params)
    replayed = count_replays(monkeypatch)
    core = make_cuda_core(checkpoint, depth=2, graphs="full", max_num_seqs=num_seqs, **settings)
    for _ in range(2):
        assert run(core, **params) == expected
        while core.prepare():
            pass
    assert run(core, **params) == expected
    assert replayed["StepGraphs"] > 20
    assert replayed["TargetGraphManager"] > 1
    if method == "draft_model":
        assert replayed["PrefillSpeculatorCudaGraphManager"] > 1
        assert replayed["DecodeSpeculatorCudaGraphManager"] > 1


@pytest.mark.parametrize("graphs", ["none", "full"])
@pytest.mark.parametrize("method", [None, "draft_model"])
def test_long_contexts_beside_prompts_in_chunks(checkpoint: Path, method: str | None, graphs: str) -> None:
    """Contexts of several segments of a kernel; graphs were captured while all were short. While some requests are
    drafted for, others are far from the end of their prompts.
    """
    lengths = (4, 150, 300, 400, 90, 260, 433, 200)
    prompts = [(prompt * 87)[:length] for prompt, length in zip(make_prompts(8), lengths, strict=True)]
    requests = [
        request(f"r{index}", prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    plain = Harness(make_cuda_core(checkpoint, backend="torch", graphs="none")).run(requests)
    speculators = () if method is None else (SpeculatorConfig(method=method, model=str(checkpoint), k=4),)
    core = make_cuda_core(
        checkpoint, backend="triton", depth=2, speculators=speculators, graphs=graphs, max_prefill_chunk=16
    )
    Harness(core).run([request("short", prompts[0], max_tokens=8)])
    while core.prepare():
        pass
    for _ in range(2):
        results = Harness(core).run(requests)
        assert {name: result.token_ids for name, result in results.items()} == {
            name: result.token_ids for name, result in plain.items()
        }


def count_replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """By class of manager."""
    counts: Counter[str] = Counter()
    replay = CudaGraphManager.replay

    def counted(self: CudaGraphManager[Any], descriptor: Any) -> None:
        counts[type(self).__name__] += 1
        replay(self, descriptor)

    monkeypatch.setattr(CudaGraphManager, "replay", counted)
    return counts


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_do_not_change_the_tokens(checkpoint: Path, method: str, params: dict[str, Any]) -> None:
    plain = run(make_cuda_core(checkpoint, backend="triton", depth=2), **params)
    model = str(checkpoint) if method == "draft_model" else None
    speculators = (SpeculatorConfig(method=method, model=model, k=4),)
    assert (
        run(make_cuda_core(checkpoint, backend="triton", depth=2, speculators=speculators), **params) == plain
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5},
        {"presence_penalty": 1.0, "logit_bias": {5: 1.0}, "min_tokens": 3},
        {"logprobs": 3},
    ],
    ids=["greedy", "sampled", "top_p", "penalties", "logprobs"],
)
@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_no_launch_waits_for_the_device(checkpoint: Path, method: str | None, params: dict[str, Any]) -> None:
    model = str(checkpoint) if method == "draft_model" else None
    speculators = () if method is None else (SpeculatorConfig(method=method, model=model, k=3),)
    core = make_cuda_core(checkpoint, backend="triton", depth=2, speculators=speculators, sync_free=True)
    run(core, **params)
