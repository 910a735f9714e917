"""Spellings of config.json against transformers: both generations, keys that are left out, nested dicts. A key that is
read otherwise, or not at all, shows in the logits and nowhere else."""

from __future__ import annotations

import contextlib
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.source import eos_token_ids
from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.models.loader import load_model, resolve_dtype
from engine.models.registry import MODELS
from tests.support.paged_forward import PagedForward
from tests.support.tiny_models import TINY_MODEL_TYPES, TINY_VOCAB_SIZE, make_tiny_checkpoint
from tests.support.tiny_moe import TINY_MOE_KINDS, make_tiny_moe, transformers_logits

CPU = torch.device("cpu")
TOLERANCE = (
    1e-4  # norms and softmax of transformers are float32; a key that is missed moves logits by 0.1 and more
)
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"
# Of gemma3_text, those of the released 4B, which says little more than its widths.
RELEASED_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
}
MOE_DEFAULTS = {"norm_topk_prob": True, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}


def make(path: Path, kind: str, **overrides: object) -> Path:
    """A tiny checkpoint of any family, in float64."""
    if kind in TINY_MOE_KINDS:
        return make_tiny_moe(path, kind, **overrides)  # type: ignore[arg-type]
    assert kind in TINY_MODEL_TYPES
    return make_tiny_checkpoint(path, kind, **overrides)  # type: ignore[arg-type]


def edit_config(path: Path, values: dict[str, Any]) -> None:
    """`values` replace entries; those that are None go."""
    raw = json.loads((path / "config.json").read_text()) | values
    gone = [key for key, value in values.items() if value is None]
    (path / "config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if key not in gone})
    )


@pytest.mark.parametrize(
    ("kind", "overrides", "edits"),
    [
        ("llama", {}, {"rope_theta": 500.0, "rope_parameters": None, "rope_scaling": LINEAR}),
        ("llama", {}, {"rope_scaling": LINEAR}),  # beside rope_parameters, which it replaces
        ("llama", {}, {"rope_parameters": YARN}),  # the original length is the model's
        ("llama", {}, {"rope_parameters": YARN, "original_max_position_embeddings": 64}),
        (
            "llama",
            {},
            {
                "rope_parameters": {**YARN, "original_max_position_embeddings": 512},
                "original_max_position_embeddings": 16,
            },
        ),
        ("llama", {"tie": False}, {"tie_word_embeddings": None, "rms_norm_eps": None, "hidden_act": None}),
        ("qwen2", {}, {"use_sliding_window": None, "layer_types": None, "sliding_window": 8}),
        ("qwen3", {"head_dim": 128}, {"head_dim": None}),
        (
            "gemma3_text",
            RELEASED_GEMMA3,
            dict.fromkeys([*RELEASED_GEMMA3, "rope_parameters", "rms_norm_eps"]),
        ),
        ("gemma3_text", {}, {"layer_types": None, "sliding_window_pattern": 2}),
        ("gemma3_text", {}, {"rope_parameters": None, "rope_theta": 5e3, "rope_scaling": LINEAR}),
        ("gemma3_text", {}, {"rope_parameters": None, "rope_local_base_freq": 99.0}),
        ("gemma3_text", {}, {"rope_parameters": {FULL: {"type": "linear", "factor": 8.0}, SLIDING: None}}),
        ("glm4_moe", {}, {"rms_norm_eps": None, "norm_topk_prob": None}),
        (
            "glm4_moe",
            {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
            dict.fromkeys(
                [
                    "n_group",
                    "topk_group",
                    "routed_scaling_factor",
                    "n_shared_experts",
                    "first_k_dense_replace",
                ]
            ),
        ),
        ("deepseek_v3", {"n_routed_experts": 16, **MOE_DEFAULTS}, dict.fromkeys(MOE_DEFAULTS)),
        ("deepseek_v3", {}, {"rope_parameters": {"factor": 4.0, "mscale_all_dim": 1.0}}),
        ("deepseek_v2", {}, {"rope_interleave": False}),  # a key of V3
    ],
)
def test_a_config_means_what_it_means_to_transformers(
    tmp_path: Path, kind: str, overrides: dict[str, Any], edits: dict[str, Any]
) -> None:
    path = make(tmp_path, kind, **overrides)
    edit_config(path, edits)
    prompt = random.Random(0).choices(range(TINY_VOCAB_SIZE), k=80)
    model = load_model(ModelConfig(model=str(path)), device=CPU).model
    forward = PagedForward(model, num_requests=1, max_tokens=80, block_size=16, dtype=torch.float64)
    (logits,) = forward.step([(0, prompt)])
    assert (logits - transformers_logits(path, prompt)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "edits", "message"),
    [
        ("llama", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_type: got 'longrope'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type: got 'dynamic'"),
        ("llama", {"rope_theta": float("nan"), "rope_parameters": None}, "rope_theta: got nan, expected a"),
        ("gemma3_text", {"rope_parameters": LINEAR}, "rope_parameters: got .* by layer type"),
        ("gemma3_text", {"rope_parameters": None, "rope_scaling": "x"}, "rope_parameters: got 'x'"),
        ("gemma3_text", {"rope_parameters": {FULL: {"type": "spiral"}}}, "rope_type: got 'spiral'"),
        ("deepseek_v3", {"routed_scaling_factor": "x"}, "routed_scaling_factor: got 'x', expected a number"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id: got '</s>', expected a token id or a list"),
        ("llama", {"eos_token_id": [2, "</s>"]}, "eos_token_id: got .*, expected a token id or a list"),
    ],
)
def test_a_spelling_that_is_not_known_is_refused(
    tmp_path: Path, kind: str, edits: dict[str, Any], message: str
) -> None:
    path = make(tmp_path, kind)
    edit_config(path, edits)
    with pytest.raises(CheckpointError, match=message):
        load_model(ModelConfig(model=str(path)), device=CPU)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "deepseek_v3", "glm4_moe"])
def test_whatever_stands_under_a_key_a_config_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    config = json.loads((make(tmp_path, kind) / "config.json").read_text())
    keys = [*config, "rope_scaling", "text_config", "quantization_config", "torch_dtype"]
    values: list[Any] = [None, True, 1.5, "x", [], [["x"]], {"rope_type": ["x"]}, {FULL: 1}]
    for key, value in product(keys, values):
        raw = config | {key: value}
        with contextlib.suppress(CheckpointError):  # any other error shows that nobody looked
            eos_token_ids(raw, {})
            dtype = resolve_dtype("auto", raw, CPU)
            MODELS.get(config["architectures"][0])(raw, dtype, torch.device("meta"))
