"""Reads the config.json of a plain decoder, and refuses what this implementation would compute wrongly.

Values are checked here, once, so that models build from numbers that make sense. Both generations of the
format are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError
from engine.layers.rotary import ROPE_TYPES, RopeConfig

DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder of the Llama family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool

    @staticmethod
    def from_raw(raw: Mapping[str, Any], rotary_share: float = 1.0) -> DecoderConfig:
        """`rotary_share`: of a head's features, those that turn. Raises CheckpointError naming the key, what was got
        and what is expected."""
        _refuse_unsupported(raw)
        num_heads = positive_int(raw, "num_attention_heads")
        num_kv_heads = positive_int(raw, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"num_key_value_heads: got {num_kv_heads}, expected a divisor of {num_heads}"
            )
        hidden_size = positive_int(raw, "hidden_size")
        head_size = positive_int(raw, "head_dim", hidden_size // num_heads)
        if head_size % 2:
            raise CheckpointError(f"head_dim: got {head_size}, expected an even number")
        max_positions = positive_int(raw, "max_position_embeddings")
        has_attention_bias = flag(raw, "attention_bias")
        return DecoderConfig(
            vocab_size=positive_int(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive_int(raw, "intermediate_size"),
            num_layers=positive_int(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            max_position_embeddings=max_positions,
            rms_norm_eps=number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
            rope=read_rope(raw, head_size, max_positions, rotary_share),
            has_qkv_bias=has_attention_bias,
            has_output_bias=has_attention_bias,
            has_mlp_bias=flag(raw, "mlp_bias"),
            has_qk_norm=False,
            is_tied=flag(raw, "tie_word_embeddings"),
        )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"hidden_act: got {activation!r}, expected 'silu'")
    refuse_quantized(raw)
    layer_types = raw.get("layer_types")
    kinds = sorted({str(kind) for kind in layer_types}) if isinstance(layer_types, list) else layer_types
    if kinds not in (None, ["full_attention"]):
        raise CheckpointError(f"layer_types: got {kinds}, expected only 'full_attention'")
    window = raw.get("sliding_window")
    if layer_types is None and window is not None and raw.get("use_sliding_window", True):
        raise CheckpointError(f"sliding_window: got {window} in use, expected full attention")


def refuse_quantized(raw: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a checkpoint whose weights are stored in another form."""
    if (quantization := raw.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"quantization_config: got {method!r}, expected an unquantised checkpoint or GGUF"
        )


def rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of either generation; `rope_scaling` holds where both stand, as in transformers. Raises CheckpointError."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"rope_parameters: got {parameters!r}, expected an object")
    return parameters


def read_rope(
    raw: Mapping[str, Any], head_size: int, max_positions: int, rotary_share: float = 1.0
) -> RopeConfig:
    """Of heads of which a share of the features turns. Raises CheckpointError."""
    parameters = rope_parameters(raw)
    for values in (raw, parameters):
        if (share := values.get("partial_rotary_factor", rotary_share)) != rotary_share:
            raise CheckpointError(f"partial_rotary_factor: got {share}, expected {rotary_share}")
    if (original := raw.get("original_max_position_embeddings")) is not None:
        parameters = {**parameters, "original_max_position_embeddings": original}
    theta = raw.get("rope_theta") or DEFAULT_ROPE_THETA
    return rope_config("rope_parameters", parameters, int(head_size * rotary_share), max_positions, theta)


def rope_config(
    name: str, parameters: Mapping[str, Any], head_size: int, max_positions: int, default_theta: Any
) -> RopeConfig:
    """One set of rotary parameters, called `name` in errors. Raises CheckpointError for a type that is not known, and
    for what is no number."""
    rope_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    ROPE_TYPES.get(rope_type)  # before its parameters are read: those of others need not be numbers
    scaling = {
        key: number(f"{name}.{key}", value)
        for key, value in parameters.items()
        if key not in ("rope_type", "type", "rope_theta") and value is not None
    }
    scaling.setdefault("original_max_position_embeddings", float(max_positions))
    return RopeConfig(
        rope_type=rope_type,
        theta=number(f"{name}.rope_theta", parameters.get("rope_theta") or default_theta),
        head_size=head_size,
        max_position_embeddings=max_positions,
        scaling=scaling,
    )


def positive_int(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{key}: got {value!r}, expected a positive whole number")
    return value


def number(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise CheckpointError(f"{key}: got {value!r}, expected a number that is not negative")
    return float(value)


def flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"{key}: got {value!r}, expected true or false")
    return value
