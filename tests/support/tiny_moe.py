"""Tiny checkpoints of the decoders with routed experts, and what they compute by definition: a whole sequence at once,
out of dictionaries of tensors, without cache, engine or our layers. It is differentiable, so that the layer that drafts
is fitted with the same code that checks it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_models import TINY_EOS_TOKEN_ID, TINY_MAX_POSITIONS, TINY_VOCAB_SIZE

Weights = Mapping[str, torch.Tensor]
Config = Mapping[str, Any]
TinyMoEKind = Literal[
    "deepseek_v3", "deepseek_v3_yarn", "deepseek_v2", "deepseek_v2_groups", "glm4_moe", "glm4_moe_norm"
]
TINY_MOE_KINDS: tuple[TinyMoEKind, ...] = (
    "deepseek_v3",
    "deepseek_v3_yarn",
    "deepseek_v2",
    "deepseek_v2_groups",
    "glm4_moe",
    "glm4_moe_norm",
)
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
_KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "rope_interleave": False, "q_lora_rank": None}),
    "deepseek_v3_yarn": ("deepseek_v3", {**_LATENT, "rope_parameters": _YARN}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "rope_parameters": _YARN}),
    "deepseek_v2_groups": (
        "deepseek_v2",
        {
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
        },
    ),
    "glm4_moe": ("glm4_moe", {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}),
    "glm4_moe_norm": (
        "glm4_moe",
        {
            "num_key_value_heads": 1,
            "use_qk_norm": True,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
    ),
}


def make_tiny_moe(
    path: Path,
    kind: TinyMoEKind,
    *,
    dtype: Literal["float64", "float32"] = "float64",
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Three layers, the first one dense, eight experts in four groups, three chosen of two groups. What would be zeros
    or ones is random, so that a tensor that was mixed up cannot go unseen. Without the layer that drafts."""
    model_type, values = _KINDS[kind]
    config = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": TINY_VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": TINY_MAX_POSITIONS,
            "initializer_range": 0.2,
            "bos_token_id": 0,
            "eos_token_id": TINY_EOS_TOKEN_ID,
            "pad_token_id": 0,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            **values,
            **overrides,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.ndim == 1 and "inv_freq" not in name:
                    tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(path)
    return path


def transformers_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size] of transformers, in the checkpoint's dtype but for norms and routers (float32)."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def write_tensors(path: Path, tensors: Weights) -> None:
    """In the place of those that are there; whoever has the old file open keeps it."""
    new = path / "new.safetensors"
    save_file(dict(tensors), new, metadata={"format": "pt"})
    new.rename(path / "model.safetensors")


# ---- by definition ---------------------------------------------------------------------------------------------------


def reference_hidden(config: Config, weights: Weights, token_ids: torch.Tensor) -> torch.Tensor:
    """[T] int64 -> [T, hidden_size] after the final norm."""
    x = weights["model.embed_tokens.weight"][token_ids]
    for index in range(config["num_hidden_layers"]):
        has_experts = index >= config["first_k_dense_replace"]
        x = decoder_layer(config, weights, f"model.layers.{index}.", x, has_experts)
    return norm(x, weights["model.norm.weight"], config["rms_norm_eps"])


def decoder_layer(
    config: Config, weights: Weights, prefix: str, x: torch.Tensor, has_experts: bool
) -> torch.Tensor:
    """x: [T, hidden_size]; returns the same shape."""
    eps = config["rms_norm_eps"]
    attend = (
        _latent_attention
        if "kv_lora_rank" in config and "deepseek" in config["model_type"]
        else _grouped_attention
    )
    x = x + attend(
        config, weights, f"{prefix}self_attn.", norm(x, weights[f"{prefix}input_layernorm.weight"], eps)
    )
    normed = norm(x, weights[f"{prefix}post_attention_layernorm.weight"], eps)
    mlp = f"{prefix}mlp."
    return x + (_experts(config, weights, mlp, normed) if has_experts else _gated(weights, mlp, normed))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def _gated(weights: Weights, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ weights[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
    return (F.silu(gate) * up) @ weights[f"{prefix}down_proj.weight"].T


def _experts(config: Config, weights: Weights, prefix: str, x: torch.Tensor) -> torch.Tensor:
    """Every expert over every token; the choice token by token, group by group."""
    logits = x @ weights[f"{prefix}gate.weight"].to(x.dtype).T
    is_v2 = config["model_type"] == "deepseek_v2"
    scores = logits.softmax(-1) if is_v2 else logits.sigmoid()
    steering = scores if is_v2 else scores + weights[f"{prefix}gate.e_score_correction_bias"]
    is_chosen = torch.zeros_like(scores)
    for token, steered in enumerate(steering.tolist()):
        is_chosen[token, _choose(config, steered)] = 1.0
    shares = scores * is_chosen
    if config["norm_topk_prob"]:
        shares = shares / shares.sum(-1, keepdim=True)
    num_experts = config["n_routed_experts"]
    outputs = torch.stack([_gated(weights, f"{prefix}experts.{expert}.", x) for expert in range(num_experts)])
    routed = torch.einsum("te,etd->td", shares * config["routed_scaling_factor"], outputs)
    return routed + _gated(weights, f"{prefix}shared_experts.", x)


def _choose(config: Config, steering: list[float]) -> list[int]:
    """The experts of one token."""
    num_groups = 1 if config.get("topk_method") == "greedy" else config["n_group"]
    size = len(steering) // num_groups
    groups = [range(group * size, (group + 1) * size) for group in range(num_groups)]
    num_counted = 1 if config["model_type"] == "deepseek_v2" else 2

    def worth(group: range) -> float:
        return sum(sorted(steering[expert] for expert in group)[-num_counted:])

    best = sorted(groups, key=worth)[-config["topk_group"] :] if num_groups > 1 else groups
    candidates = [expert for group in best for expert in group]
    return sorted(candidates, key=lambda expert: steering[expert])[-config["num_experts_per_tok"] :]


def _latent_attention(config: Config, weights: Weights, prefix: str, x: torch.Tensor) -> torch.Tensor:
    """Keys and values of every head, expanded."""
    num_heads, plain, rope = (
        config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    if config["q_lora_rank"] is None:
        query = x @ weights[f"{prefix}q_proj.weight"].T
    else:
        compressed = norm(
            x @ weights[f"{prefix}q_a_proj.weight"].T, weights[f"{prefix}q_a_layernorm.weight"], 1e-6
        )
        query = compressed @ weights[f"{prefix}q_b_proj.weight"].T
    query = query.view(len(x), num_heads, plain + rope)
    row = x @ weights[f"{prefix}kv_a_proj_with_mqa.weight"].T
    latent = norm(row[:, : config["kv_lora_rank"]], weights[f"{prefix}kv_a_layernorm.weight"], 1e-6)
    key_value = (latent @ weights[f"{prefix}kv_b_proj.weight"].T).view(len(x), num_heads, -1)
    is_paired = config.get("rope_interleave", True)
    shared = _rotate(row[:, None, config["kv_lora_rank"] :], config, is_paired).expand(-1, num_heads, -1)
    query = torch.cat((query[..., :plain], _rotate(query[..., plain:], config, is_paired)), dim=-1)
    key = torch.cat((key_value[..., :plain], shared), dim=-1)
    scale = (plain + rope) ** -0.5
    parameters = config["rope_parameters"]
    if parameters["rope_type"] == "yarn":
        scale *= (0.1 * parameters["mscale_all_dim"] * math.log(parameters["factor"]) + 1.0) ** 2
    return _causal(query, key, key_value[..., plain:], scale) @ weights[f"{prefix}o_proj.weight"].T


def _grouped_attention(config: Config, weights: Weights, prefix: str, x: torch.Tensor) -> torch.Tensor:
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def heads(name: str) -> torch.Tensor:
        output = x @ weights[f"{prefix}{name}_proj.weight"].T + weights.get(f"{prefix}{name}_proj.bias", 0.0)
        output = output.view(len(x), -1, head_size)
        if config["use_qk_norm"] and name != "v":
            output = norm(output, weights[f"{prefix}{name}_norm.weight"], config["rms_norm_eps"])
        if name == "v":
            return output
        size = int(head_size * config["rope_parameters"]["partial_rotary_factor"])
        return torch.cat((_rotate(output[..., :size], config, False), output[..., size:]), dim=-1)

    query, key, value = heads("q"), heads("k"), heads("v")
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return _causal(query, key, value, head_size**-0.5) @ weights[f"{prefix}o_proj.weight"].T


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """[T, heads, size] each -> [T, heads * value size]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    is_later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(is_later, float("-inf")).softmax(-1), value)
    return mixed.flatten(1)


def _rotate(x: torch.Tensor, config: Config, is_paired: bool) -> torch.Tensor:
    """x: [T, heads, size]. Features i and i + 1 turn together, or i and i + size / 2."""
    size = x.shape[-1]
    angles = torch.arange(len(x), dtype=torch.float32)[:, None] * _frequencies(
        config["rope_parameters"], size
    )
    cosine, sine = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    first, second = (x[..., 0::2], x[..., 1::2]) if is_paired else x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _frequencies(parameters: Mapping[str, Any], size: int) -> torch.Tensor:
    """[size / 2] float32. YaRN: turns within the original length decide which are divided by the factor."""
    theta = parameters["rope_theta"]
    plain: torch.Tensor = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if parameters["rope_type"] == "default":
        return plain
    length = parameters["original_max_position_embeddings"]

    def pair(num_turns: float) -> float:
        return size * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(parameters["beta_fast"])), 0), math.ceil(pair(parameters["beta_slow"]))
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (min(high, size - 1) - low)).clamp(0, 1)
    stretched: torch.Tensor = plain / parameters["factor"]
    return stretched * ramp + plain * (1 - ramp)
