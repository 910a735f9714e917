"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from engine.models.decoder_config import DecoderConfig
from engine.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    architectures: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        return replace(
            DecoderConfig.from_raw({"use_sliding_window": False, **raw}),
            has_qkv_bias=True,
            has_output_bias=False,
            has_mlp_bias=False,
        )
