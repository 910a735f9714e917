"""What a Gemma decoder is made of, whichever generation: one geometry per layer, one rotary base per layer type.

Gemma 3 and Gemma 4 write different config.json files (engine/models/gemma3.py, gemma4.py read them) and are computed
by the same layers (gemma_layers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError
from engine.layers.rotary import RopeConfig
from engine.models.decoder_config import number, positive_int, refuse_quantized, rope_config

SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True, kw_only=True)
class GemmaLayerConfig:
    """One layer. All layers of a type that have KV of their own have the same heads."""

    layer_type: str
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    kv_source: int | None  # the layer whose K and V it reads; itself, or None: another model's
    has_value_proj: bool = True  # else the value is the key's projection before norm and rotation


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Routed experts beside the dense branch of every layer."""

    num_experts: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class PerLayerInputConfig:
    """Embeddings of their own for every layer."""

    size: int
    vocab_size: int  # ids beyond it have the embedding of id 0


@dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """A decoder. `window`: keys that a sliding layer's query sees, itself included."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    window: int
    layers: tuple[GemmaLayerConfig, ...]
    rope: Mapping[str, RopeConfig]  # by layer type
    attention_scale: float
    norm_offset: float  # see GemmaRMSNorm
    has_value_norm: bool
    has_layer_scalar: bool  # each layer's output is scaled
    final_softcap: float | None
    per_layer_input: PerLayerInputConfig | None = None
    experts: ExpertsConfig | None = None

    @property
    def layer_types(self) -> tuple[str, ...]:
        return tuple(layer.layer_type for layer in self.layers)

    @property
    def first_shared_layer(self) -> int:
        """Index of the first layer that reads another layer's K and V; the number of layers when none does."""
        shared = [index for index, layer in enumerate(self.layers) if layer.kv_source != index]
        return shared[0] if shared else len(self.layers)


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's part of a config: the whole of a text-only one, `text_config` of a multimodal one."""
    nested = raw.get("text_config", raw)
    if not isinstance(nested, dict):
        raise CheckpointError(f"text_config: got {nested!r}, expected an object")
    return nested


def read_layer_types(raw: Mapping[str, Any], default_pattern: int | None = None) -> list[str]:
    """`layer_types`, or, when there is none, every `default_pattern`-th layer full. Raises CheckpointError."""
    num_layers = positive_int(raw, "num_hidden_layers")
    types = raw.get("layer_types")
    if types is None and default_pattern is not None:
        return [FULL if (index + 1) % default_pattern == 0 else SLIDING for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        got = f"{len(types)} entries" if isinstance(types, list) else repr(types)
        raise CheckpointError(f"layer_types: got {got}, expected {num_layers}, one per layer")
    if unknown := sorted({str(kind) for kind in types} - {SLIDING, FULL}):
        raise CheckpointError(f"layer_types: got {', '.join(unknown)}, expected {SLIDING!r} or {FULL!r}")
    return list(types)


def read_rope(
    name: str, parameters: Any, head_size: int, max_positions: int, default_theta: float | None = None
) -> RopeConfig:
    """One layer type's rotary parameters. Raises CheckpointError."""
    if not isinstance(parameters, dict):
        raise CheckpointError(f"rope_parameters.{name}: got {parameters!r}, expected an object")
    return rope_config(f"rope_parameters.{name}", parameters, head_size, max_positions, default_theta)


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Raises CheckpointError for what no Gemma of these generations does, and this code would compute wrongly."""
    refuse_quantized(raw)
    expected_values = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False, "vision"),  # "vision": among the tokens of an image
        "tie_word_embeddings": (True,),
    }
    for key, expected in expected_values.items():
        if (value := raw.get(key, expected[0])) not in expected:
            raise CheckpointError(f"{key}: got {value!r}, expected {expected[0]!r}")


def read_softcap(raw: Mapping[str, Any]) -> float | None:
    value = raw.get("final_logit_softcapping")
    if value is None:
        return None
    cap = number("final_logit_softcapping", value)
    if cap == 0:
        raise CheckpointError("final_logit_softcapping: got 0, expected a positive number or null")
    return cap


def check_heads(num_heads: int, layers: Sequence[GemmaLayerConfig]) -> None:
    """Raises CheckpointError unless query heads divide among KV heads, and layers of a type share a geometry."""
    geometry: dict[str, tuple[int, int]] = {}
    for index, layer in enumerate(layers):
        if num_heads % layer.num_kv_heads:
            raise CheckpointError(
                f"layer {index}: got {layer.num_kv_heads} KV heads, expected a divisor of {num_heads}"
            )
        if layer.head_size % 2:
            raise CheckpointError(f"layer {index}: got head_dim {layer.head_size}, expected an even number")
        own = (layer.num_kv_heads, layer.head_size)
        if geometry.setdefault(layer.layer_type, own) != own:
            raise CheckpointError(
                f"layer {index}: got (KV heads, head_dim) {own}, expected {geometry[layer.layer_type]} as the other "
                f"{layer.layer_type} layers"
            )
