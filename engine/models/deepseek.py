"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, shared and routed experts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from engine.errors import CheckpointError
from engine.kernels.choose_experts import Routing
from engine.kv_spec import KVGroupSpec
from engine.layers.latent_attention import LatentAttention, LatentGeometry
from engine.layers.rotary import RopeConfig
from engine.models.decoder_config import flag, number, positive_int, read_rope
from engine.models.fp8_blocks import announce_dequantisation, dequantised, read_fp8_blocks
from engine.models.moe_config import MoEConfig, check_groups, read_corrected_routing
from engine.models.moe_decoder import MoEDecoder, NamedTensors

_ROTATED = re.compile(r"\.self_attn\.(q_proj|q_b_proj|kv_a_proj_with_mqa)\.weight$")

# What transformers takes for keys that a config leaves out.
V2_DEFAULTS: Mapping[str, Any] = {"first_k_dense_replace": 0, "n_shared_experts": 2}
V3_DEFAULTS: Mapping[str, Any] = {
    "rope_interleave": True,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


class DeepseekForCausalLM(MoEDecoder):
    """V2 and V3 differ in their routers, and V3 may have a layer that drafts."""

    architectures: ClassVar[tuple[str, ...]] = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = {**(V2_DEFAULTS if _is_v2(config) else V3_DEFAULTS), **config}
        self._fp8_blocks = read_fp8_blocks(config)
        self._is_interleaved = _is_v2(config) or flag(config, "rope_interleave")
        self._geometry = read_geometry(config)
        if self._fp8_blocks is not None:
            announce_dequantisation(type(self), config, dtype, device)
        super().__init__(config, dtype, device)

    def read_config(self, raw: Mapping[str, Any]) -> MoEConfig:
        routing = read_softmax_routing(raw) if _is_v2(raw) else read_corrected_routing(raw)
        return MoEConfig.from_raw(raw, routing, read_latent_rope(raw))

    def make_attention(self, layer_index: int) -> LatentAttention:
        return LatentAttention(
            self._geometry, layer_index, self.hidden_size, dtype=self.dtype, device=self.device
        )

    def kv_group(self, name: str, num_layers: int) -> KVGroupSpec:
        geometry = self._geometry
        return KVGroupSpec(
            name=name,
            layer_indices=tuple(range(num_layers)),
            num_kv_heads=1,
            head_size=geometry.row_size,
            value_size=geometry.latent_size,
            bytes_per_token=geometry.row_size * self.dtype.itemsize * num_layers,
        )

    def plain_tensors(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Without scales, and with rotary features in halves instead of pairs."""
        for name, tensor in dequantised(weights, self._fp8_blocks):
            if self._is_interleaved and (match := _ROTATED.search(name)) is not None:
                is_key = match[1] == "kv_a_proj_with_mqa"
                tensor = self._in_halves(tensor, 1 if is_key else self._geometry.num_heads)
            yield name, tensor

    def _in_halves(self, weight: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Reorder the last `rope_size` rows of each head: 0, 1, 2, 3, 4, 5 -> 0, 2, 4, 1, 3, 5. Queries and keys alike,
        so their products stay what they are."""
        rope_size = self._geometry.rope_size
        if len(weight) % num_heads or len(weight) // num_heads < rope_size:
            return weight  # misshapen; the loader names it
        heads = weight.view(num_heads, -1, weight.shape[1])
        plain, rotated = torch.split(heads, [heads.shape[1] - rope_size, rope_size], dim=1)
        return torch.cat((plain, rotated[:, 0::2], rotated[:, 1::2]), dim=1).flatten(0, 1)


def _is_v2(raw: Mapping[str, Any]) -> bool:
    return raw.get("architectures") == ["DeepseekV2ForCausalLM"]


def read_latent_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Of the part of a head that turns. Raises CheckpointError naming the key."""
    rope_size = positive_int(raw, "qk_rope_head_dim")
    if rope_size % 2:
        raise CheckpointError(f"qk_rope_head_dim: got {rope_size}, expected an even number")
    return read_rope(raw, rope_size, positive_int(raw, "max_position_embeddings"))


def read_geometry(raw: Mapping[str, Any]) -> LatentGeometry:
    """Raises CheckpointError naming the key."""
    if flag(raw, "attention_bias"):
        raise CheckpointError("attention_bias: got true, expected false")
    rope, plain_size = read_latent_rope(raw), positive_int(raw, "qk_nope_head_dim")
    return LatentGeometry(
        num_heads=positive_int(raw, "num_attention_heads"),
        latent_size=positive_int(raw, "kv_lora_rank"),
        rope_size=rope.head_size,
        plain_size=plain_size,
        value_size=positive_int(raw, "v_head_dim"),
        query_rank=None if raw.get("q_lora_rank") is None else positive_int(raw, "q_lora_rank"),
        scale=(plain_size + rope.head_size) ** -0.5 * _yarn_scale(rope) ** 2,
    )


def _yarn_scale(rope: RopeConfig) -> float:
    """0.1 m ln(factor) + 1, for queries and for keys: DeepSeek's YaRN scales logits where others scale cosines and
    sines."""
    factor, mscale = rope.scaling.get("factor", 1.0), rope.scaling.get("mscale_all_dim", 0.0)
    is_scaled = rope.rope_type != "default" and factor > 1.0
    return 0.1 * mscale * math.log(factor) + 1.0 if is_scaled else 1.0


def read_softmax_routing(raw: Mapping[str, Any]) -> Routing:
    """Of DeepSeek-V2: softmax shares as they are, among all experts or within the best groups."""
    method = raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(f"topk_method: got {method!r}, expected 'greedy' or 'group_limited_greedy'")
    if (scoring := raw.get("scoring_func", "softmax")) != "softmax":
        raise CheckpointError(f"scoring_func: got {scoring!r}, expected 'softmax'")
    if flag(raw, "norm_topk_prob"):
        raise CheckpointError("norm_topk_prob: got true, expected false")
    num_groups = 1 if method == "greedy" else positive_int(raw, "n_group")
    return check_groups(
        Routing(
            num_experts=positive_int(raw, "n_routed_experts"),
            top_k=positive_int(raw, "num_experts_per_tok"),
            num_groups=num_groups,
            num_chosen_groups=1 if method == "greedy" else positive_int(raw, "topk_group"),
            scoring="softmax",
            normalises=False,
            scale=number("routed_scaling_factor", raw.get("routed_scaling_factor", 1.0)),
        )
    )
