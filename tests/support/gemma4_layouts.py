"""The ways in which Gemma 4 checkpoints are stored, made of the text-only one: functions over (config, tensors)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.support.gemma4_reference import Weights
from tests.support.tiny_gemma4 import kv_shapes

TOWERS = (
    "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
    "model.audio_tower.layers.0.norm_out.weight",
    "model.embed_vision.embedding_projection.weight",
    "model.embed_audio.embedding_projection.weight",
    "model.vision_embedder.patch_dense.weight",
)


def as_multimodal(
    config: Mapping[str, Any], weights: Weights
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The decoder inside a model with towers, as the released checkpoints have it."""
    outer = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": config["dtype"],
        "eos_token_id": config["eos_token_id"],
        "text_config": {key: value for key, value in config.items() if key != "architectures"},
        "vision_config": {"model_type": "gemma4_vision"},
        "audio_config": {"model_type": "gemma4_audio"},
    }
    renamed = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    return outer, renamed | {name: torch.ones(3, 2) for name in TOWERS}


def with_dead_kv(config: Mapping[str, Any], weights: Weights) -> dict[str, torch.Tensor]:
    """Keys and values also for the layers that read another layer's, as the released converter writes them."""
    first_shared = len(config["layer_types"]) - config["num_kv_shared_layers"]
    dead = {
        f"model.layers.{layer}.{name}": torch.full(shape, torch.nan)
        for layer in range(first_shared, len(config["layer_types"]))
        for name, shape in kv_shapes(config, layer).items()
    }
    return {**weights, **dead}


def with_experts_apart(weights: Weights) -> dict[str, torch.Tensor]:
    """Three matrices per expert instead of two stacks per layer."""
    apart: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(pair.chunk(2) for pair in weight):
                prefix = f"{name.removesuffix('gate_up_proj')}{expert}"
                apart |= {
                    f"{prefix}.gate_proj.weight": gate.contiguous(),
                    f"{prefix}.up_proj.weight": up.contiguous(),
                }
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            apart |= {
                f"{prefix}{expert}.down_proj.weight": down.clone() for expert, down in enumerate(weight)
            }
        else:
            apart[name] = weight
    return apart
