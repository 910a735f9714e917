"""What GGUF files of each architecture are: names, tensors stored in another form, and config entries of their own.

One entry a family. Metadata that all families share is read in gguf_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.checkpoint.gguf_metadata import ArchitectureMetadata

Tensor = npt.NDArray[np.float32]

_LLAMA_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = {
    **_LLAMA_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA3_27B_NUM_LAYERS = 62


def _as_stored(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    return tensor


def _deinterleave_llama(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """llama.cpp's converter interleaves the rotary halves of Q and K."""
    for part, count in ((".q_proj.", "num_attention_heads"), (".k_proj.", "num_key_value_heads")):
        if part in name:
            return deinterleave_rotary(tensor, config[count], config["head_dim"])
    return tensor


def _unshift_gemma_norms(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """The converter adds the one that the model adds to its norm weights."""
    return tensor - 1.0 if name.endswith("norm.weight") else tensor


def _silu(values: ArchitectureMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu"}


def _gemma3_config(values: ArchitectureMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The 27B's attention scale is not its head size's; the file does not hold it."""
    scale_size = config["head_dim"]
    if config["num_hidden_layers"] == GEMMA3_27B_NUM_LAYERS:
        scale_size = config["hidden_size"] // config["num_attention_heads"]
    rope = dict(config["rope_parameters"])
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": values.count("attention.sliding_window"),
        "sliding_window_pattern": values.count("attention.sliding_window_pattern", 6),
        "query_pre_attn_scalar": scale_size,
        "rope_parameters": None,  # of full layers only: the released spelling
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "rope_local_base_freq": values.optional("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": values.optional("final_logit_softcapping", None),
        "attn_logit_softcapping": values.optional("attn_logit_softcapping", None),
    }


@dataclass(frozen=True, kw_only=True)
class GGUFFamily:
    """`restore`: (Hugging Face name, tensor as stored, config) -> the tensor of the Hugging Face format."""

    architecture: str  # of the model
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_LAYER_NAMES)
    restore: Callable[[str, Tensor, Mapping[str, Any]], Tensor] = _as_stored
    extra_config: Callable[[ArchitectureMetadata, Mapping[str, Any]], dict[str, Any]] = _silu


GGUF_FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily(architecture="LlamaForCausalLM", restore=_deinterleave_llama),
    "qwen2": GGUFFamily(architecture="Qwen2ForCausalLM"),
    "qwen3": GGUFFamily(architecture="Qwen3ForCausalLM"),
    "gemma3": GGUFFamily(
        architecture="Gemma3ForCausalLM",
        layer_names=_GEMMA_LAYER_NAMES,
        restore=_unshift_gemma_norms,
        extra_config=_gemma3_config,
    ),
}


def deinterleave_rotary(tensor: Tensor, num_heads: int, head_size: int) -> Tensor:
    """Undo the row order of Q and K: in a head of size 4, rows [0, 2, 1, 3] of the file become [0, 1, 2, 3].

    tensor: [num_heads * head_size, ...] float32; the file pairs row i with row i + head_size / 2.
    """
    if len(tensor) != num_heads * head_size:
        return tensor  # misshapen: loading reports it
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
