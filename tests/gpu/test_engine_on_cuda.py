"""The engine on a CUDA device: the same tokens as transformers, with either attention backend, one or two steps in
flight, drafts or none, replayed or launched, and no host sync between launches.

Each test has a list of combinations in which any two of its factors' values meet; all of them would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import SpeculatorConfig, engine_config
from engine.core import EngineCore
from tests.support.cuda_engine import capture_all, count_replays, make_cuda_core
from tests.support.engine_harness import Harness, request
from tests.support.tiny_models import TINY_MODEL_TYPES, TinyModelType, make_tiny_checkpoint

pytestmark = pytest.mark.gpu
MAX_TOKENS = 48
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
WAYS_OF_SAMPLING = {
    "greedy": GREEDY,
    "sampled": {"temperature": 0.8, "seed": 5},
    "top_p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5},
    "penalties": {"presence_penalty": 1.0, "logit_bias": {5: 1.0}, "min_tokens": 3},
    "logprobs": {"logprobs": 3},
}
Checkpoints = Callable[[TinyModelType], Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Made when they are asked for, once each."""
    made: dict[str, Path] = {}

    def get(model_type: TinyModelType) -> Path:
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            made[model_type] = make_tiny_checkpoint(folder, model_type, dtype="float32")
        return made[model_type]

    return get


def make_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (5 + 7 * index,), generator=generator).tolist() for index in range(count)]


def make_core(
    checkpoint: Path,
    *,
    backend: str = "triton",
    depth: int = 2,
    method: str | None = None,
    dtype: str = "float32",
    graphs: str = "auto",
    sync_free: bool = False,
    verification: str = "coupled",
    **scheduler: Any,
) -> EngineCore:
    speculators: tuple[SpeculatorConfig, ...] = ()
    if method is not None:
        model = str(checkpoint) if method == "draft_model" else None
        speculators = (SpeculatorConfig(method=method, model=model, k=4),)
    return make_cuda_core(
        sync_free=sync_free,
        model={"model": str(checkpoint), "dtype": dtype},
        speculators=speculators,
        attention_backend=backend,
        max_steps_in_flight=depth,
        cuda_graphs=graphs,
        verification=verification,
        scheduler={"max_num_seqs": 8, "max_prefill_stall": None, "check_invariants": True, **scheduler},
        cache={"block_size": 16, "num_blocks": 512},
    )


def run(core: EngineCore, **params: Any) -> dict[str, list[int]]:
    requests = [
        request(f"r{index}", prompt, max_tokens=MAX_TOKENS, ignore_eos=True, **params)
        for index, prompt in enumerate(make_prompts(8))
    ]
    return {name: result.token_ids for name, result in Harness(core).run(requests).items()}


@pytest.mark.parametrize(
    ("model_type", "backend", "depth"),
    [
        (model_type, backend, 1 + (model + other) % 2)
        for model, model_type in enumerate(TINY_MODEL_TYPES)
        for other, backend in enumerate(("torch", "triton"))
    ],
)
def test_greedy_tokens_equal_transformers(
    checkpoints: Checkpoints, model_type: TinyModelType, backend: str, depth: int
) -> None:
    checkpoint = checkpoints(model_type)
    tokens = run(make_core(checkpoint, backend=backend, depth=depth, max_prefill_chunk=24))
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()
    for index, prompt in enumerate(make_prompts(8)):
        ids = torch.tensor([prompt], device="cuda")
        output = model.generate(
            ids, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        assert tokens[f"r{index}"] == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("model_type", "method", "params", "num_seqs"),
    [
        pytest.param(
            model_type,
            method,
            (GREEDY, SAMPLED)[(model + other) % 2],
            (3, 8)[(model + other // 2) % 2],
            id="-".join(
                (
                    model_type,
                    str(method),
                    ("greedy", "sampled")[(model + other) % 2],
                    ("padded", "largest")[(model + other // 2) % 2],
                )
            ),
        )
        for model, model_type in enumerate(TINY_MODEL_TYPES)
        for other, method in enumerate((None, "ngram", "draft_model", "suffix"))
    ],
)
def test_graphs_do_not_change_the_tokens(
    checkpoints: Checkpoints,
    model_type: TinyModelType,
    method: str | None,
    params: dict[str, Any],
    num_seqs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole steps, also with drafts; and beside prompt chunks the target's and the drafter's passes."""
    checkpoint = checkpoints(model_type)
    settings: dict[str, Any] = {"method": method, "max_prefill_chunk": 16}
    expected = run(make_core(checkpoint, graphs="none", depth=1, **settings), **params)
    core = make_core(checkpoint, graphs="full", max_num_seqs=num_seqs, **settings)
    for _ in range(2):  # in the second run, `suffix` knows the texts of the first, and asks for other graphs
        assert run(core, **params) == expected
        capture_all(core)
    replayed = count_replays(monkeypatch)  # of one run: with 8 rows it has one step beside prompt chunks
    assert run(core, **params) == expected
    assert replayed["StepGraphs"] > (3 if method == "suffix" else 8)  # of five tokens each
    assert replayed["TargetGraphManager"] >= 1
    if method == "draft_model":
        assert replayed["PrefillSpeculatorCudaGraphManager"] >= 1
        assert replayed["DecodeSpeculatorCudaGraphManager"] >= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_equal_launches_at_every_batch_size_and_length(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 to max + 1 requests of 16 to 32,000 tokens; all graphs were captured while contexts were short. In bfloat16 the
    products of few rows are our own kernel."""
    checkpoint = make_tiny_checkpoint(tmp_path, "llama", dtype="float32", max_position_embeddings=33_000)
    generator = torch.Generator().manual_seed(4)
    lengths = (16, 1000, 32_000, 4000, 17, 600, 2100, 30, 9)
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]
    largest = len(lengths) - 1

    def make(graphs: str) -> EngineCore:
        return make_cuda_core(
            model={"model": str(checkpoint), "dtype": dtype},
            cuda_graphs=graphs,
            scheduler={
                "max_num_seqs": largest,
                "max_num_batched_tokens": 4096,
                "max_prefill_stall": None,
            },
            cache={"block_size": 16, "num_blocks": 4096, "enable_prefix_cache": False},
        )

    def tokens(core: EngineCore, batch: int) -> dict[str, list[int]]:
        requests = [
            request(f"{batch}-{index}", prompt, max_tokens=20, ignore_eos=True)
            for index, prompt in enumerate(prompts[:batch])
        ]
        return {name: result.token_ids for name, result in Harness(core).run(requests).items()}

    launched, core = make("none"), make("full")
    Harness(core).run([request("short", prompts[0], max_tokens=8)])
    capture_all(core)
    replayed = count_replays(monkeypatch)
    for batch in range(1, largest + 2):
        assert tokens(core, batch) == tokens(launched, batch)
    assert replayed["StepGraphs"] > 30


@pytest.mark.parametrize(
    ("model_type", "method", "graphs"),
    [
        (model_type, method, ("none", "full")[(model + other) % 2])
        for model, model_type in enumerate(TINY_MODEL_TYPES)
        for other, method in enumerate((None, "draft_model"))
    ],
)
def test_long_contexts_beside_prompts_in_chunks(
    checkpoints: Checkpoints, model_type: TinyModelType, method: str | None, graphs: str
) -> None:
    """Contexts of several segments of a kernel; graphs were captured while all were short. While some requests are
    drafted for, others are far from the end of their prompts.
    """
    checkpoint = checkpoints(model_type)
    lengths = (4, 150, 300, 400, 90, 260, 433, 200)
    prompts = [(prompt * 87)[:length] for prompt, length in zip(make_prompts(8), lengths, strict=True)]
    requests = [
        request(f"r{index}", prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    plain = Harness(make_core(checkpoint, backend="torch", depth=1, graphs="none")).run(requests)
    core = make_core(checkpoint, method=method, graphs=graphs, max_prefill_chunk=16)
    Harness(core).run([request("short", prompts[0], max_tokens=8)])
    capture_all(core)
    for _ in range(2):
        results = Harness(core).run(requests)
        assert {name: result.token_ids for name, result in results.items()} == {
            name: result.token_ids for name, result in plain.items()
        }


@pytest.mark.parametrize(
    ("model_type", "method", "params"),
    [
        pytest.param(
            model_type,
            method,
            (GREEDY, SAMPLED)[(model + other) % 2],
            id=f"{model_type}-{method}-{('greedy', 'sampled')[(model + other) % 2]}",
        )
        for model, model_type in enumerate(TINY_MODEL_TYPES)
        for other, method in enumerate(("ngram", "draft_model"))
    ],
)
def test_drafts_do_not_change_the_tokens(
    checkpoints: Checkpoints, model_type: TinyModelType, method: str, params: dict[str, Any]
) -> None:
    checkpoint = checkpoints(model_type)
    plain = run(make_core(checkpoint), **params)
    assert run(make_core(checkpoint, method=method), **params) == plain


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_graphs_do_not_change_the_tokens_of_the_ratio_test(
    checkpoints: Checkpoints, params: dict[str, Any]
) -> None:
    """Rows that pad a step have distributions of drafts as well."""
    options: dict[str, Any] = {"method": "draft_model", "verification": "ratio"}
    launched, core = (
        make_core(checkpoints("llama"), graphs=graphs, **options) for graphs in ("none", "full")
    )
    run(core)
    capture_all(core)
    assert run(core, **params) == run(launched, **params)


@pytest.mark.parametrize(
    ("model_type", "method", "sampling"),
    [
        (TINY_MODEL_TYPES[(way + other) % len(TINY_MODEL_TYPES)], method, sampling)
        for way, sampling in enumerate(WAYS_OF_SAMPLING)
        for other, method in enumerate((None, "ngram", "draft_model"))
    ],
)
def test_no_launch_waits_for_the_device(
    checkpoints: Checkpoints, model_type: TinyModelType, method: str | None, sampling: str
) -> None:
    core = make_core(checkpoints(model_type), method=method, sync_free=True)
    run(core, **WAYS_OF_SAMPLING[sampling])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_first_one(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints("llama")
    expected = run(make_core(checkpoint))
    core = EngineCore(
        engine_config(
            model={"model": str(checkpoint), "dtype": "float32"},
            device="cuda:1",
            scheduler={"max_num_seqs": 8},
            cache={"num_blocks": 512},
        )
    )
    try:
        capture_all(core)
        assert run(core) == expected
    finally:
        torch.cuda.set_device(0)
