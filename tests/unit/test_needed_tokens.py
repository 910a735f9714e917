"""Behind the last keys and values only the tokens are computed whose output is used, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly import assemble
from engine.attention.metadata import NeededTokens
from engine.batch.input_batch import InputBatch
from engine.config import ModelConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.layers.linear import Linear
from engine.models.loader import LoadedModel, load_model
from engine.worker.model_runner import ModelRunner
from tests.support.engine_harness import Harness, Result, request
from tests.support.tiny_models import make_tiny_checkpoint
from tests.support.tiny_moe import make_tiny_moe

NUM_OWN, NUM_SHARED = 3, 3
CONFIG = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_OWN + NUM_SHARED,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "num_kv_shared_layers": NUM_SHARED,
    "hidden_size_per_layer_input": 8,
    "use_double_wide_mlp": True,
    "max_position_embeddings": 128,
    "dtype": "float64",
    "eos_token_id": 1,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
PROMPTS = [list(range(3, 3 + length)) for length in (30, 19, 5, 1)]


MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": partial(make_tiny_checkpoint, model_type="llama"),
    "gemma3_text": partial(make_tiny_checkpoint, model_type="gemma3_text"),
    "glm4_moe": partial(make_tiny_moe, kind="glm4_moe"),
    "deepseek_v2": partial(make_tiny_moe, kind="deepseek_v2"),
}


@pytest.fixture(scope="module", params=["gemma4", *MAKERS])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp(request.param)
    if request.param in MAKERS:
        MAKERS[request.param](path)
        return load_model(ModelConfig(model=str(path)), device=torch.device("cpu"))
    (path / "config.json").write_text(json.dumps(CONFIG))
    loaded = load_model(ModelConfig(model=str(path), load_format="dummy"), device=torch.device("cpu"))
    for parameter in loaded.model.parameters():
        parameter.mul_(5.0 if parameter.ndim > 1 else 1.0)  # so that texts depend on their tokens
    return loaded


def run(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, max_num_batched_tokens: int = 64, **params: Any
) -> tuple[dict[str, Result], list[int]]:
    """The results, and the rows that the last layer goes on with behind attention in each pass."""
    rows: list[int] = []
    product = Linear._by_library
    last = loaded.model.layers[-1].attention.output  # type: ignore[index]

    def count(self: Linear, x: torch.Tensor) -> torch.Tensor:
        if self is last:
            rows.append(len(x))
        return product(self, x)

    config = engine_config(
        model={"model": "test"},
        device="cpu",
        draft_policy="first",
        speculators=(SpeculatorConfig(method="ngram", k=2, options={"min_n": "1"}),),
        scheduler={
            "max_prefill_chunk": 8,
            "max_prefill_stall": None,
            "max_num_batched_tokens": max_num_batched_tokens,
        },
        cache={"block_size": 4, "num_blocks": 200, "enable_prefix_cache": False},
    )
    with monkeypatch.context() as patched:
        patched.setattr(Linear, "_by_library", count)
        core = EngineCore(config, build=lambda c, _: assemble(c, loaded, device=torch.device("cpu")))
        requests = [
            request(f"r{index}", prompt, max_tokens=10, ignore_eos=True, **params)
            for index, prompt in enumerate(PROMPTS)
        ]
        return Harness(core).run(requests), rows


@pytest.mark.parametrize("max_num_batched_tokens", [8, 64])
def test_only_needed_tokens_are_computed_and_the_text_is_the_same(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, max_num_batched_tokens: int
) -> None:
    """With few tokens a step, some steps have nothing but the middle of a prompt."""
    num_wanted: list[int] = []  # rows that logits are computed of, in each pass
    needed_tokens = ModelRunner._needed_tokens

    def note(self: ModelRunner, batch: InputBatch) -> NeededTokens | None:
        num_wanted.append(len(batch.logits_row_list))
        return needed_tokens(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "_needed_tokens", note)
        results, rows = run(loaded, monkeypatch, max_num_batched_tokens)
        patched.setattr(ModelRunner, "_needed_tokens", lambda self, batch: None)
        expected, all_rows = run(loaded, monkeypatch, max_num_batched_tokens)
    assert 0 in num_wanted or max_num_batched_tokens > 8
    assert {name: result.token_ids for name, result in results.items()} == {
        name: result.token_ids for name, result in expected.items()
    }
    assert sum(rows) == sum(num_wanted)
    # Of a prompt, its last token alone is needed.
    assert sum(all_rows) - sum(rows) >= sum(map(len, PROMPTS)) - len(PROMPTS)


def test_prompt_logprobs_need_all_tokens(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    results, rows = run(loaded, monkeypatch, prompt_logprobs=0)
    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "_needed_tokens", lambda self, batch: None)
        expected, all_rows = run(loaded, monkeypatch, prompt_logprobs=0)
    assert rows == all_rows
    for name, result in results.items():
        assert result.prompt_logprobs == expected[name].prompt_logprobs
