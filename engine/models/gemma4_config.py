"""Reads the config.json of Gemma 4 decoders: released, re-saved by transformers, and the drafter's text part.

Two spellings of the full layers' geometry exist: `global_head_dim` with `num_global_key_value_heads` (released), and
`per_layer_config` by layer index (re-saved). Where both stand, the second holds, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import CheckpointError
from engine.models.decoder_config import flag, number, positive_int
from engine.models.gemma_config import (
    FULL,
    SLIDING,
    ExpertsConfig,
    GemmaConfig,
    GemmaLayerConfig,
    PerLayerInputConfig,
    check_heads,
    read_layer_types,
    read_rope,
    read_softcap,
    refuse_unsupported,
)

DEFAULT_GLOBAL_HEAD_DIM = 512
DEFAULT_LAYER_PATTERN = 6


def read_gemma4_config(raw: Mapping[str, Any]) -> GemmaConfig:
    """raw: the decoder's own config (see text_config). Raises CheckpointError naming key, got and expected."""
    refuse_unsupported(raw)
    kinds = read_layer_types(raw, DEFAULT_LAYER_PATTERN)
    kinds[-1] = FULL  # as transformers does, whatever the file says
    max_positions = positive_int(raw, "max_position_embeddings")
    layers = _read_layers(raw, kinds)
    check_heads(positive_int(raw, "num_attention_heads"), layers)
    parameters = raw.get("rope_parameters")
    if not isinstance(parameters, dict):
        raise CheckpointError(f"rope_parameters: got {parameters!r}, expected an object by layer type")
    head_sizes = {layer.layer_type: layer.head_size for layer in layers}
    return GemmaConfig(
        vocab_size=positive_int(raw, "vocab_size"),
        hidden_size=positive_int(raw, "hidden_size"),
        num_heads=positive_int(raw, "num_attention_heads"),
        max_position_embeddings=max_positions,
        rms_norm_eps=number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        window=positive_int(raw, "sliding_window"),
        layers=layers,
        rope={
            kind: read_rope(kind, parameters.get(kind), head_size, max_positions)
            for kind, head_size in head_sizes.items()
        },
        attention_scale=1.0,
        norm_offset=0.0,
        has_value_norm=True,
        has_layer_scalar=True,
        final_softcap=read_softcap(raw),
        per_layer_input=_read_per_layer_input(raw),
        experts=_read_experts(raw),
    )


def _read_layers(raw: Mapping[str, Any], kinds: Sequence[str]) -> tuple[GemmaLayerConfig, ...]:
    num_shared = raw.get("num_kv_shared_layers") or 0
    if not isinstance(num_shared, int) or not 0 <= num_shared <= len(kinds):
        raise CheckpointError(f"num_kv_shared_layers: got {num_shared!r}, expected 0..{len(kinds)}")
    first_shared = len(kinds) - num_shared
    has_equal_kv = flag(raw, "attention_k_eq_v")
    width = positive_int(raw, "intermediate_size")
    shared_width = 2 * width if flag(raw, "use_double_wide_mlp") else width
    layers = []
    for index, kind in enumerate(kinds):
        num_kv_heads, head_size = _geometry(raw, index, kind, has_equal_kv)
        layers.append(
            GemmaLayerConfig(
                layer_type=kind,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                intermediate_size=width if index < first_shared else shared_width,
                kv_source=index if index < first_shared else _source_of(index, kinds, first_shared),
                has_value_proj=not (has_equal_kv and kind == FULL),
            )
        )
    return tuple(layers)


def _source_of(index: int, kinds: Sequence[str], first_shared: int) -> int | None:
    """The last layer of the type that has KV of its own; None when no layer at all has."""
    if first_shared == 0:
        return None
    sources = [source for source in range(first_shared) if kinds[source] == kinds[index]]
    if not sources:
        raise CheckpointError(
            f"layer_types: layer {index} reads the KV of an earlier {kinds[index]} layer, but none of the layers "
            f"below {first_shared} is one"
        )
    return sources[-1]


def _geometry(raw: Mapping[str, Any], index: int, kind: str, has_equal_kv: bool) -> tuple[int, int]:
    """(KV heads, head size) of a layer."""
    num_kv_heads, head_size = positive_int(raw, "num_key_value_heads"), positive_int(raw, "head_dim")
    by_layer = raw.get("per_layer_config")
    if by_layer is not None:
        own = _by_index(by_layer).get(index, {})
        return (
            positive_int(own, "num_key_value_heads", num_kv_heads),
            positive_int(own, "head_dim", head_size),
        )
    if kind == SLIDING:
        return num_kv_heads, head_size
    if has_equal_kv:
        num_kv_heads = positive_int(raw, "num_global_key_value_heads", num_kv_heads)
    return num_kv_heads, positive_int(raw, "global_head_dim", DEFAULT_GLOBAL_HEAD_DIM)


def _by_index(by_layer: Any) -> dict[int, Mapping[str, Any]]:
    """Keys are layer indices as text, with or without leading zeros."""
    if not isinstance(by_layer, dict) or not all(
        str(key).isdecimal() and isinstance(value, dict) for key, value in by_layer.items()
    ):
        raise CheckpointError(f"per_layer_config: got {by_layer!r}, expected an object by layer index")
    return {int(key): value for key, value in by_layer.items()}


def _read_per_layer_input(raw: Mapping[str, Any]) -> PerLayerInputConfig | None:
    if not raw.get("hidden_size_per_layer_input"):
        return None
    return PerLayerInputConfig(
        size=positive_int(raw, "hidden_size_per_layer_input"),
        vocab_size=positive_int(raw, "vocab_size_per_layer_input", positive_int(raw, "vocab_size")),
    )


def _read_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    if not flag(raw, "enable_moe_block"):
        return None
    experts = ExpertsConfig(
        num_experts=positive_int(raw, "num_experts"),
        top_k=positive_int(raw, "top_k_experts"),
        intermediate_size=positive_int(raw, "moe_intermediate_size"),
    )
    if experts.top_k > experts.num_experts:
        raise CheckpointError(f"top_k_experts: got {experts.top_k}, expected at most {experts.num_experts}")
    return experts
