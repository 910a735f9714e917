"""Gemma 3, text (arXiv:2503.19786): sliding and full layers, norms before and after each branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.models.decoder_config import number, positive_int
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

DEFAULT_HEAD_DIM = 256
DEFAULT_LAYER_PATTERN = 6
DEFAULT_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}


class Gemma3ForCausalLM(GemmaDecoder):
    """Of a multimodal checkpoint the text decoder alone."""

    architectures: ClassVar[tuple[str, ...]] = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> GemmaConfig:
        text = text_config(raw)
        refuse_unsupported(text)
        num_heads = positive_int(text, "num_attention_heads")
        head_size = positive_int(text, "head_dim", DEFAULT_HEAD_DIM)
        kinds = read_layer_types(text, positive_int(text, "sliding_window_pattern", DEFAULT_LAYER_PATTERN))
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
            rms_norm_eps=number("rms_norm_eps", text.get("rms_norm_eps", 1e-6)),
            window=positive_int(text, "sliding_window"),
            layers=layers,
            rope={
                kind: read_rope(kind, parameters[kind], head_size, max_positions, DEFAULT_THETA[kind])
                for kind in sorted(set(kinds))
            },
            attention_scale=positive_int(text, "query_pre_attn_scalar", DEFAULT_HEAD_DIM) ** -0.5,
            norm_offset=1.0,
            has_value_norm=False,
            has_layer_scalar=False,
            final_softcap=read_softcap(text),
        )


def _rope_parameters(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """By layer type, from the new spelling, or from the released one: `rope_scaling` is of the full layers only."""
    parameters = text.get("rope_parameters")
    if isinstance(parameters, dict) and (FULL in parameters or SLIDING in parameters):
        return {kind: parameters.get(kind) or {} for kind in (FULL, SLIDING)}
    scaling = dict(text.get("rope_scaling") or parameters or {})
    theta = text.get("rope_theta", scaling.pop("rope_theta", DEFAULT_THETA[FULL]))
    return {
        FULL: {"rope_theta": theta, **scaling},
        SLIDING: {"rope_theta": text.get("rope_local_base_freq", DEFAULT_THETA[SLIDING])},
    }
