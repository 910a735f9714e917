"""Gemma 4, text: dense, with per-layer embeddings and shared KV (E2B, E4B), and with experts (26B-A4B).

Every part stands in gemma_decoder.py; the config says which of them a checkpoint has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.errors import CheckpointError
from engine.models.gemma4_config import read_gemma4_config
from engine.models.gemma_config import GemmaConfig, text_config
from engine.models.gemma_decoder import GemmaDecoder


class Gemma4ForCausalLM(GemmaDecoder):
    """Of a multimodal checkpoint the text decoder alone."""

    architectures: ClassVar[tuple[str, ...]] = (
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
    )

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> GemmaConfig:
        text = text_config(raw)
        config = read_gemma4_config(text)
        if config.first_shared_layer == 0:
            raise CheckpointError(
                f"num_kv_shared_layers: got {len(config.layers)}, all layers, expected fewer for a target model"
            )
        return config
