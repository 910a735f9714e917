"""Gemma 3, text (arXiv:2503.19786): sliding and full layers, norms before and after each branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.errors import CheckpointError
from engine.models.decoder_config import number, positive_int, rope_parameters
from engine.models.gemma_config import (
    FULL,
    SLIDING,
    GemmaConfig,
    GemmaLayerConfig,
    check_heads,
    read_layer_types,
    read_rope,
    read_softcap,
    refuse_unsupported,
    text_config,
)
from engine.models.gemma_decoder import GemmaDecoder

# What transformers takes for keys that a config leaves out, as the released multimodal ones do.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
DEFAULT_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}


class Gemma3ForCausalLM(GemmaDecoder):
    """Of a multimodal checkpoint the text decoder alone."""

    architectures: ClassVar[tuple[str, ...]] = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> GemmaConfig:
        text = {**DEFAULTS, **text_config(raw)}
        refuse_unsupported(text)
        num_heads = positive_int(text, "num_attention_heads")
        head_size = positive_int(text, "head_dim")
        kinds = read_layer_types(text, positive_int(text, "sliding_window_pattern"))
        max_positions = positive_int(text, "max_position_embeddings")
        layers = tuple(
            GemmaLayerConfig(
                layer_type=kind,
                num_kv_heads=positive_int(text, "num_key_value_heads"),
                head_size=head_size,
                intermediate_size=positive_int(text, "intermediate_size"),
                kv_source=index,
            )
            for index, kind in enumerate(kinds)
        )
        check_heads(num_heads, layers)
        parameters = _rope_parameters(text)
        return GemmaConfig(
            vocab_size=positive_int(text, "vocab_size"),
            hidden_size=positive_int(text, "hidden_size"),
            num_heads=num_heads,
            max_position_embeddings=max_positions,
            rms_norm_eps=number("rms_norm_eps", text["rms_norm_eps"]),
            window=positive_int(text, "sliding_window"),
            layers=layers,
            rope={
                kind: read_rope(kind, parameters[kind], head_size, max_positions, DEFAULT_THETA[kind])
                for kind in sorted(set(kinds))
            },
            attention_scale=positive_int(text, "query_pre_attn_scalar") ** -0.5,
            norm_offset=1.0,
            has_value_norm=False,
            has_layer_scalar=False,
            final_softcap=read_softcap(text),
        )


def _rope_parameters(text: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By layer type: `rope_parameters`, or the released spelling, whose `rope_scaling` is of full layers only."""
    by_kind = text.get("rope_parameters") or {}
    if not isinstance(by_kind, dict) or not set(by_kind) <= {FULL, SLIDING}:
        raise CheckpointError(f"rope_parameters: got {by_kind!r}, expected an object by layer type")
    full, sliding = (rope_parameters({"rope_parameters": by_kind.get(kind)}) for kind in (FULL, SLIDING))
    scaling = rope_parameters({"rope_scaling": text.get("rope_scaling")})
    return {
        FULL: {"rope_theta": text.get("rope_theta"), **full, **scaling},
        SLIDING: {"rope_theta": text.get("rope_local_base_freq"), **sliding},
    }
