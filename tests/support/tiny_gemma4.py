"""Tiny Gemma 4 checkpoints, targets with habits and assistants fitted to them, written in the released spelling.

Two kinds hold what the released sizes have between them: `ple_shared` (like E2B: per-layer embeddings, KV-shared layers
with wide MLPs; the assistant's head is sparse) and `moe_keqv` (like 26B-A4B: experts beside the dense MLP, full layers
with equal keys and values and fewer KV heads; the assistant's head is dense).
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.support.gemma4_reference import (
    FULL,
    POLICIES,
    SLIDING,
    AssistantReference,
    Gemma4Reference,
    TargetRun,
    Weights,
    pack,
)
from tests.support.tiny_models import HABITUAL_TOKENS, TINY_EOS_TOKEN_ID, TINY_MAX_POSITIONS, TINY_VOCAB_SIZE

Gemma4Kind = Literal["ple_shared", "moe_keqv"]
GEMMA4_KINDS: tuple[Gemma4Kind, ...] = ("ple_shared", "moe_keqv")
DTypeName = Literal["float64", "float32"]
Config = dict[str, Any]

WINDOW = 8
NUM_CENTROIDS, NUM_NEAREST = 32, 8
FIT_DEPTH = 3  # draft steps that an assistant is fitted for
FIT_STEPS = 120
NUM_BATCHES = 8  # of sequences that are learned from together

_COMMON: Mapping[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "max_position_embeddings": TINY_MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": TINY_EOS_TOKEN_ID,
}
_OF_KIND: Mapping[str, Mapping[str, Any]] = {
    "ple_shared": {
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": TINY_VOCAB_SIZE,
        "enable_moe_block": False,
    },
    "moe_keqv": {
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}


@dataclass(frozen=True)
class Gemma4Pair:
    """Two checkpoint directories (without a tokenizer), and what they compute."""

    target: Path
    assistant: Path
    sequences: list[list[int]]  # greedy texts that the assistant was fitted to

    def references(self) -> tuple[Gemma4Reference, AssistantReference]:
        target = Gemma4Reference.load(self.target)
        return target, AssistantReference.load(self.assistant, target)


def make_tiny_gemma4_pair(
    folder: Path, kind: Gemma4Kind, dtype: DTypeName = "float64", *, steps: int = FIT_STEPS
) -> Gemma4Pair:
    """Both under `folder`; the assistant knows a few of the target's greedy texts."""
    target = make_tiny_gemma4_target(folder / "target", kind, dtype)
    reference = Gemma4Reference.load(target)
    generator = random.Random(0)
    with torch.no_grad():
        sequences = [
            reference.greedy(generator.choices(HABITUAL_TOKENS[1:], k=length), 40 - length)
            for length in (3, 9, 14, 20)
        ]
    make_tiny_assistant(folder / "assistant", target, sequences, steps=steps)
    return Gemma4Pair(target, folder / "assistant", sequences)


def make_tiny_gemma4_target(
    path: Path, kind: Gemma4Kind, dtype: DTypeName = "float64", *, seed: int = 0
) -> Path:
    """Random weights; a few tokens get nearly all probability, and texts fall into loops now and then."""
    config = {**_COMMON, **_OF_KIND[kind], "dtype": dtype}
    weights = _random_weights(target_shapes(config), dtype, seed)
    table = weights["model.embed_tokens.weight"]
    habitual = torch.zeros(len(table), dtype=torch.bool)
    habitual[list(HABITUAL_TOKENS)] = True
    table *= torch.where(habitual, 0.6, 0.06)[
        :, None
    ]  # small beside what the layers add: not every text is a loop
    table[TINY_EOS_TOKEN_ID] *= 0.7
    weights["model.norm.weight"] *= 4.0
    return write_checkpoint(path, config, weights)


def make_tiny_assistant(
    path: Path, target_path: Path, sequences: Sequence[Sequence[int]], *, steps: int = FIT_STEPS
) -> AssistantReference:
    """Fit an assistant to what the target says along `sequences`, in few steps: it is right now and then."""
    target = Gemma4Reference.load(target_path)
    config = assistant_config(target.config)
    weights = _random_weights(assistant_shapes(config), config["dtype"], 1)
    assistant = AssistantReference(weights, config, target)
    with torch.no_grad():
        runs = [target.run(torch.tensor(sequence)) for sequence in sequences]
    batches = [pack(runs[first::NUM_BATCHES]) for first in range(min(NUM_BATCHES, len(runs)))]
    trained = [weight.requires_grad_() for weight in weights.values() if weight.is_floating_point()]
    optimiser = torch.optim.Adam(trained, lr=1e-2)
    for step in range(steps):
        optimiser.zero_grad()
        torch.autograd.backward(_loss(assistant, batches[step % len(batches)]))
        optimiser.step()
    write_checkpoint(path, config, {name: weight.detach() for name, weight in weights.items()})
    return AssistantReference.load(path, target)


def _loss(assistant: AssistantReference, run: TargetRun) -> torch.Tensor:
    """Of guessing what the target would say at the next positions, from every position."""
    last_keys = torch.arange(len(run.token_ids) - FIT_DEPTH - 1)
    last_keys = last_keys[run.starts[last_keys] == run.starts[last_keys + FIT_DEPTH + 1]]
    token_ids = run.token_ids[last_keys[:, None] + 1 + torch.arange(FIT_DEPTH)]
    wanted = run.logits.softmax(-1)
    loss = torch.zeros((), dtype=wanted.dtype)
    clusters = assistant.weights.get("masked_embedding.token_ordering")
    for step, normed in enumerate(assistant.along(run, last_keys, token_ids, POLICIES["last_key"])):
        shares = wanted[last_keys + 1 + step]
        loss = loss + F.cross_entropy(normed @ assistant.weights["model.embed_tokens.weight"].T, shares)
        if clusters is not None:
            of_cluster = shares[:, clusters.view(NUM_CENTROIDS, -1)].sum(-1)
            loss = loss + F.cross_entropy(assistant.centroid_logits(normed), of_cluster)
    return loss


# ---- configs, tensors, files ----------------------------------------------------------------------------------------


def assistant_config(target: Mapping[str, Any]) -> Config:
    """A whole config.json, with the KV geometry of the target's text config."""
    text = {
        key: value for key, value in target.items() if not key.startswith(("moe_", "num_experts", "top_k"))
    }
    kinds = [SLIDING, SLIDING, FULL]
    text |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_kv_shared_layers": len(kinds),
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
    }
    del text["architectures"]
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": target["dtype"],
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": not target["enable_moe_block"],
        "num_centroids": NUM_CENTROIDS,
        "centroid_intermediate_top_k": NUM_NEAREST,
        "tie_word_embeddings": True,
        "text_config": text,
    }


def target_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a text-only checkpoint."""
    size, kinds = config["hidden_size"], config["layer_types"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], size),
        "model.norm.weight": (size,),
    }
    if per_layer := config["hidden_size_per_layer_input"]:
        width = len(kinds) * per_layer
        shapes["model.embed_tokens_per_layer.weight"] = (config["vocab_size_per_layer_input"], width)
        shapes["model.per_layer_model_projection.weight"] = (width, size)
        shapes["model.per_layer_projection_norm.weight"] = (per_layer,)
    for index in range(len(kinds)):
        shapes |= {
            f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(config, index).items()
        }
    return shapes


def assistant_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    text = config["text_config"]
    size, backbone_size = text["hidden_size"], config["backbone_hidden_size"]
    shapes = target_shapes(text) | {
        "pre_projection.weight": (size, 2 * backbone_size),
        "post_projection.weight": (backbone_size, size),
    }
    if config["use_ordered_embeddings"]:
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], size)
        shapes["masked_embedding.token_ordering"] = (text["vocab_size"],)
    return shapes


def _layer_shapes(config: Mapping[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    size, width = config["hidden_size"], config["intermediate_size"]
    is_shared = index >= len(config["layer_types"]) - config["num_kv_shared_layers"]
    if is_shared and config["use_double_wide_mlp"]:
        width *= 2
    head_size = kv_shapes(config, index)["self_attn.k_norm.weight"][0]
    query_size = config["num_attention_heads"] * head_size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query_size, size),
        "self_attn.q_norm.weight": (head_size,),
        "self_attn.o_proj.weight": (size, query_size),
        "mlp.gate_proj.weight": (width, size),
        "mlp.up_proj.weight": (width, size),
        "mlp.down_proj.weight": (size, width),
        "layer_scalar": (1,),
    }
    norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    if not is_shared:
        shapes |= kv_shapes(config, index)
    if per_layer := config["hidden_size_per_layer_input"]:
        shapes["per_layer_input_gate.weight"] = (per_layer, size)
        shapes["per_layer_projection.weight"] = (size, per_layer)
        shapes["post_per_layer_input_norm.weight"] = (size,)
    shapes |= {f"{name}_layernorm.weight": (size,) for name in norms}
    return shapes | (_expert_shapes(config) if config["enable_moe_block"] else {})


def kv_shapes(config: Mapping[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    """What makes a layer's keys and values; without a value projection where it is the key's."""
    is_full = config["layer_types"][index] == FULL
    is_equal = is_full and config["attention_k_eq_v"]
    head_size = config["global_head_dim" if is_full else "head_dim"]
    num_kv_heads = config["num_global_key_value_heads" if is_equal else "num_key_value_heads"]
    projection = (num_kv_heads * head_size, config["hidden_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.k_proj.weight": projection,
        "self_attn.k_norm.weight": (head_size,),
    }
    return shapes if is_equal else shapes | {"self_attn.v_proj.weight": projection}


def _expert_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    size, width, num_experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    return {
        "router.proj.weight": (num_experts, size),
        "router.scale": (size,),
        "router.per_expert_scale": (num_experts,),
        "experts.gate_up_proj": (num_experts, 2 * width, size),
        "experts.down_proj": (num_experts, size, width),
        "pre_feedforward_layernorm_2.weight": (size,),
        "post_feedforward_layernorm_1.weight": (size,),
        "post_feedforward_layernorm_2.weight": (size,),
    }


def _random_weights(
    shapes: Mapping[str, tuple[int, ...]], dtype: DTypeName, seed: int
) -> dict[str, torch.Tensor]:
    """Norms and scalars are around one, none of them one: whoever forgets them is found."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("token_ordering"):
            weights[name] = torch.randperm(shape[0], generator=generator)
            continue
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
        if name.endswith("layer_scalar"):
            weights[name] = 0.8 + 0.1 * values.tanh()
        elif len(shape) == 1:
            weights[name] = 1.0 + 0.2 * values
        else:
            weights[name] = 0.25 * values
    return weights


def write_checkpoint(path: Path, config: Mapping[str, Any], weights: Weights) -> Path:
    """A safetensors directory; floating-point tensors in the config's dtype."""
    dtype = getattr(torch, config["dtype"])
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in weights.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path
