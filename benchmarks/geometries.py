"""Geometries of released models and of their drafters, for benchmarks with dummy weights: config.json as dicts."""

from __future__ import annotations

from typing import Any

_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.25,
    },
}
_GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "head_dim": 256,
    "global_head_dim": 512,
    "vocab_size": 262144,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "rope_parameters": _GEMMA4_ROPE,
}
_GEMMA4_LARGE = {
    **_GEMMA4,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_LLAMA,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {  # with the router and the MTP layer of V3
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "vocab_size": 102400,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
    },
    "gemma-4-e4b": {
        **_GEMMA4,
        "hidden_size": 2560,
        "num_hidden_layers": 42,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 18,
    },
    "gemma-4-26b-a4b": {
        **_GEMMA4_LARGE,
        "hidden_size": 2816,
        "num_hidden_layers": 30,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "gemma-4-31b": {
        **_GEMMA4_LARGE,
        "hidden_size": 5376,
        "num_hidden_layers": 60,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
}


def with_layers(config: dict[str, Any], num_layers: int | None) -> dict[str, Any]:
    """The same geometry with about so many layers, at least one of every kind; None: with all of them."""
    if num_layers is None:
        return config
    layer_types = config.get("layer_types", ["full_attention"])
    period = layer_types.index("full_attention") + 1
    num_own = max(-(-num_layers // period), 1) * period
    num_shared = num_own if config.get("num_kv_shared_layers") else 0
    changed: dict[str, Any] = {"num_hidden_layers": num_own + num_shared}
    if "layer_types" in config:
        changed |= {
            "layer_types": layer_types[: num_own + num_shared],
            "num_kv_shared_layers": num_shared,
        }
    return {**config, **changed}


def _gemma4_assistant(target: str, **text: Any) -> dict[str, Any]:
    source = GEOMETRIES[target]
    same = ("vocab_size", "head_dim", "global_head_dim", "sliding_window", "max_position_embeddings")
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": source["hidden_size"],
        "text_config": {
            **{key: source[key] for key in same},
            "num_hidden_layers": 4,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 0,
            "num_key_value_heads": source["num_key_value_heads"],
            "num_global_key_value_heads": source.get("num_global_key_value_heads"),
            "attention_k_eq_v": source.get("attention_k_eq_v", False),
            "rope_parameters": _GEMMA4_ROPE,
            **text,
        },
    }


DRAFTERS: dict[tuple[str, str], dict[str, Any] | None] = {
    ("llama-3.1-8b", "eagle3"): {
        **GEOMETRIES["llama-3.1-8b"],
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
    },
    ("gemma-4-e4b", "gemma4_mtp"): {
        **_gemma4_assistant("gemma-4-e4b", hidden_size=256, intermediate_size=2048, num_attention_heads=4),
        "use_ordered_embeddings": True,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
    },
    ("gemma-4-26b-a4b", "gemma4_mtp"): _gemma4_assistant(
        "gemma-4-26b-a4b", hidden_size=1024, intermediate_size=8192, num_attention_heads=16
    ),
    ("gemma-4-31b", "gemma4_mtp"): _gemma4_assistant(
        "gemma-4-31b", hidden_size=1024, intermediate_size=8192, num_attention_heads=32
    ),
    ("deepseek-v2-lite", "mtp"): None,  # in the target's own checkpoint
}
"""config.json of a drafter by (target, method). Methods that need no weights draft for every target."""
