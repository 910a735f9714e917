"""GLM-4.5 and 4.6 (arXiv:2508.06471): grouped-query attention that rotates a part of each head, experts as in
DeepSeek-V3, and a layer that drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from engine.errors import CheckpointError
from engine.kv_spec import KVGroupSpec
from engine.models.decoder_config import DecoderConfig, flag, number, rope_parameters
from engine.models.llama import SelfAttention, llama_kv_group
from engine.models.moe_config import MoEConfig, read_corrected_routing
from engine.models.moe_decoder import MoEDecoder

# What transformers takes for keys that a config leaves out.
DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
DEFAULT_ROTARY_SHARE = 0.5  # of the head size


class Glm4MoeForCausalLM(MoEDecoder):
    architectures: ClassVar[tuple[str, ...]] = ("Glm4MoeForCausalLM",)

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = {**DEFAULTS, **config}
        self._attention_config = read_attention_config(config)
        super().__init__(config, dtype, device)

    def read_config(self, raw: Mapping[str, Any]) -> MoEConfig:
        return MoEConfig.from_raw(raw, read_corrected_routing(raw), self._attention_config.rope)

    def make_attention(self, layer_index: int) -> SelfAttention:
        return SelfAttention(self._attention_config, layer_index, self.dtype, self.device)

    def kv_group(self, name: str, num_layers: int) -> KVGroupSpec:
        return llama_kv_group(name, replace(self._attention_config, num_layers=num_layers), self.dtype)


def read_attention_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises CheckpointError naming the key."""
    share = DEFAULT_ROTARY_SHARE
    for values in (raw, rope_parameters(raw)):
        share = number("partial_rotary_factor", values.get("partial_rotary_factor", share))
    config = DecoderConfig.from_raw(raw, share)
    if config.rope.head_size % 2 or not 0 < config.rope.head_size <= config.head_size:
        raise CheckpointError(
            f"partial_rotary_factor: got {share}, expected an even part of the head size {config.head_size}"
        )
    return replace(config, has_qk_norm=flag(raw, "use_qk_norm"), has_output_bias=False)
