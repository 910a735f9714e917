"""Reads the config.json of decoders with routed experts in the manner of DeepSeek, and refuses what would be computed
wrongly. What differs between the families' attention is read beside their models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError
from engine.kernels.choose_experts import Routing
from engine.layers.rotary import RopeConfig
from engine.models.decoder_config import flag, number, positive_int


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The first layers are dense, all others have experts; further layers of the checkpoint draft."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense layers
    num_layers: int
    num_dense_layers: int
    expert_size: int  # intermediate size of an expert
    shared_size: int  # the same of the expert that computes every token; 0: there is none
    routing: Routing
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    num_mtp_layers: int

    @staticmethod
    def from_raw(raw: Mapping[str, Any], routing: Routing, rope: RopeConfig) -> MoEConfig:
        """Raises CheckpointError naming the key, what was got and what is expected."""
        if flag(raw, "tie_word_embeddings"):
            raise CheckpointError("tie_word_embeddings: got true, expected false")
        if (activation := raw.get("hidden_act", "silu")) != "silu":
            raise CheckpointError(f"hidden_act: got {activation!r}, expected 'silu'")
        if (frequency := raw.get("moe_layer_freq", 1)) != 1:
            raise CheckpointError(f"moe_layer_freq: got {frequency!r}, expected 1")
        expert_size = positive_int(raw, "moe_intermediate_size")
        return MoEConfig(
            vocab_size=positive_int(raw, "vocab_size"),
            hidden_size=positive_int(raw, "hidden_size"),
            intermediate_size=positive_int(raw, "intermediate_size"),
            num_layers=positive_int(raw, "num_hidden_layers"),
            num_dense_layers=_count(raw, "first_k_dense_replace"),
            expert_size=expert_size,
            shared_size=expert_size * _count(raw, "n_shared_experts"),
            routing=routing,
            max_position_embeddings=positive_int(raw, "max_position_embeddings"),
            rms_norm_eps=number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
            rope=rope,
            num_mtp_layers=_count(raw, "num_nextn_predict_layers"),
        )


def read_corrected_routing(raw: Mapping[str, Any]) -> Routing:
    """Of DeepSeek-V3 and GLM-4.5: sigmoid scores, a correction, groups worth their two best experts."""
    for key, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (got := raw.get(key, expected)) != expected:
            raise CheckpointError(f"{key}: got {got!r}, expected {expected!r}")
    num_groups = positive_int(raw, "n_group")
    return check_groups(
        Routing(
            num_experts=positive_int(raw, "n_routed_experts"),
            top_k=positive_int(raw, "num_experts_per_tok"),
            num_groups=num_groups,
            num_chosen_groups=positive_int(raw, "topk_group"),
            scoring="sigmoid",
            is_corrected=True,
            normalises=flag(raw, "norm_topk_prob"),
            scale=number("routed_scaling_factor", raw.get("routed_scaling_factor")),
        )
    )


def check_groups(routing: Routing) -> Routing:
    """The same; raises CheckpointError when groups do not divide the experts, or hold too few of them."""
    num_experts, num_groups = routing.num_experts, routing.num_groups
    size, rest = divmod(num_experts, num_groups)
    least = 2 if routing.is_corrected and num_groups > 1 else 1
    if rest or size < least:
        raise CheckpointError(
            f"n_group: got {num_groups}, expected a divisor of n_routed_experts {num_experts} that leaves at least "
            f"{least} a group"
        )
    if routing.num_chosen_groups > num_groups:
        raise CheckpointError(
            f"topk_group: got {routing.num_chosen_groups}, expected at most n_group {num_groups}"
        )
    if routing.top_k > (candidates := routing.num_chosen_groups * size):
        raise CheckpointError(
            f"num_experts_per_tok: got {routing.top_k}, expected at most the {candidates} experts to choose from"
        )
    return routing


def _count(raw: Mapping[str, Any], key: str) -> int:
    """A whole number that may be 0, or be left out or null for 0."""
    value = raw.get(key) or 0
    return value if value == 0 else positive_int(raw, key)
