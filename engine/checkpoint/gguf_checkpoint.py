"""GGUF files as checkpoints: config from metadata, tensors dequantised and given their Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.source import CheckpointSource
from engine.errors import CheckpointError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# llama.cpp's converter interleaves the rotary halves of Q and K of this architecture; the others keep them.
INTERLEAVED_ROTARY_ARCHITECTURES = frozenset({"llama"})

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
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
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFCheckpoint(CheckpointSource):
    """One .gguf file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _file(self) -> GGUFFile:
        return GGUFFile(self.path)

    def config(self) -> dict[str, Any]:
        try:
            return build_config(
                self._file.metadata, {name: info.shape for name, info in self._file.tensors.items()}
            )
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def generation_config(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> Iterator[tuple[str, Any]]:
        config = self.config()
        interleaved = config["model_type"] in INTERLEAVED_ROTARY_ARCHITECTURES
        for name in self._file.tensors:
            tensor = self._file.read(name)
            checkpoint_name = hugging_face_name(name)
            if interleaved and ".q_proj." in checkpoint_name:
                tensor = deinterleave_rotary(tensor, config["num_attention_heads"], config["head_dim"])
            elif interleaved and ".k_proj." in checkpoint_name:
                tensor = deinterleave_rotary(tensor, config["num_key_value_heads"], config["head_dim"])
            yield checkpoint_name, tensor


def hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names stay: see load_strict."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def deinterleave_rotary(
    tensor: npt.NDArray[np.float32], num_heads: int, head_size: int
) -> npt.NDArray[np.float32]:
    """Undo the row order of Q and K: in a head of size 4, rows [0, 2, 1, 3] of the file become [0, 1, 2, 3].

    tensor: [num_heads * head_size, ...] float32; the file pairs row i with row i + head_size / 2.
    """
    if len(tensor) != num_heads * head_size:
        return tensor  # misshapen: loading reports it
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def build_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The config.json that the metadata and the tensors' shapes stand for."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        expected = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"general.architecture: got {architecture!r}, expected one of {expected}")
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"split.count: got {metadata['split.count']} files, expected all tensors in one"
        )
    if "rope_freqs.weight" in shapes:
        raise CheckpointError("rope_freqs.weight: Llama 3 rope scaling is read from safetensors only")
    if "token_embd.weight" not in shapes:
        raise CheckpointError("token_embd.weight: no such tensor")
    values = _ArchitectureMetadata(architecture, metadata)
    num_heads = values.count("attention.head_count")
    hidden_size = values.count("embedding_length")
    head_size = values.count("attention.key_length", hidden_size // num_heads)
    if (rotary_size := values.count("rope.dimension_count", head_size)) != head_size:
        raise CheckpointError(f"{architecture}.rope.dimension_count: got {rotary_size}, expected {head_size}")
    return {
        "model_type": architecture,
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": values.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.count("attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": values.required("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(values),
        "attention_bias": any(name.endswith(".attn_output.bias") for name in shapes),
        "mlp_bias": any(name.endswith(".ffn_down.bias") for name in shapes),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


class _ArchitectureMetadata:
    """The metadata under "<architecture>."."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._architecture = architecture
        self._metadata = metadata

    def count(self, key: str, default: int | None = None) -> int:
        value = self.required(key) if default is None else self.optional(key, default)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self._architecture}.{key}: got {value!r}, expected a positive whole number"
            )
        return value

    def required(self, key: str) -> Any:
        full_key = f"{self._architecture}.{key}"
        if full_key not in self._metadata:
            raise CheckpointError(f"{full_key}: missing in the metadata")
        return self._metadata[full_key]

    def optional(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}", default)


def _rope_parameters(values: _ArchitectureMetadata) -> dict[str, Any]:
    rope_type = values.optional("rope.scaling.type", "none")
    parameters = {
        "rope_theta": values.optional("rope.freq_base", 10000.0),
        "rope_type": "default" if rope_type == "none" else rope_type,
    }
    if rope_type != "none":
        parameters["factor"] = values.required("rope.scaling.factor")
    if rope_type == "yarn":
        parameters["original_max_position_embeddings"] = values.required(
            "rope.scaling.original_context_length"
        )
    return parameters
