"""Qwen3 (arXiv:2505.09388): Llama with a norm over every query and key head, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from engine.models.decoder_config import DecoderConfig
from engine.models.llama import LlamaForCausalLM

# What transformers takes for keys that a config leaves out.
DEFAULTS: Mapping[str, Any] = {"head_dim": 128, "use_sliding_window": False}


class Qwen3ForCausalLM(LlamaForCausalLM):
    architectures: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        return replace(DecoderConfig.from_raw({**DEFAULTS, **raw}), has_qk_norm=True, has_mlp_bias=False)
