"""GGUF files as checkpoints: config from metadata, tensors dequantised and given their Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf_families import GGUF_FAMILIES, GGUFFamily
from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.gguf_metadata import ArchitectureMetadata
from engine.checkpoint.source import CheckpointSource
from engine.errors import CheckpointError

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# What other implementations multiply by; no model here does.
_FACTORS = (
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "rope.scale_linear",
    "rope.scaling.alpha",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
# A file has one end of a sequence, one of a turn and one of a message; in a chat each of them ends an answer.
_END_KEYS = ("eos", "eot", "eom")
# Most converters write one of these ids; the others, which the model's generation_config lists, are found by name.
_END_TOKENS = frozenset(
    ("<|endoftext|>", "<|im_end|>", "<end_of_turn>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
)
_TOKENS = "tokenizer.ggml.tokens"
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
        """The end tokens that the vocabulary names, beside those of the metadata (in `config`)."""
        return {"eos_token_id": sorted(self._file.find_strings(_TOKENS, _END_TOKENS).values())}

    def tensors(self) -> Iterator[tuple[str, Any]]:
        config = self.config()
        family = GGUF_FAMILIES[config["gguf_architecture"]]
        for name in self._file.tensors:
            checkpoint_name = hugging_face_name(name, family)
            yield checkpoint_name, family.restore(checkpoint_name, self._file.read(name), config)


def hugging_face_name(name: str, family: GGUFFamily) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names stay: see load_strict."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in family.layer_names:
        return name
    return f"model.layers.{match[1]}.{family.layer_names[match[2]]}.{match[3]}"


def build_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The config.json that the metadata and the tensors' shapes stand for."""
    architecture = str(metadata.get("general.architecture"))
    if architecture not in GGUF_FAMILIES:
        expected = ", ".join(GGUF_FAMILIES)
        raise CheckpointError(f"general.architecture: got {architecture!r}, expected one of {expected}")
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"split.count: got {metadata['split.count']} files, expected all tensors in one"
        )
    if "rope_freqs.weight" in shapes:
        raise CheckpointError("rope_freqs.weight: Llama 3 rope scaling is read from safetensors only")
    if "token_embd.weight" not in shapes:
        raise CheckpointError("token_embd.weight: no such tensor")
    values = ArchitectureMetadata(architecture, metadata)
    values.refuse(_FACTORS)
    num_heads = values.count("attention.head_count")
    hidden_size = values.count("embedding_length")
    head_size = values.count("attention.key_length", hidden_size // num_heads)
    if (rotary_size := values.count("rope.dimension_count", head_size)) != head_size:
        raise CheckpointError(f"{architecture}.rope.dimension_count: got {rotary_size}, expected {head_size}")
    family = GGUF_FAMILIES[architecture]
    config = {
        "gguf_architecture": architecture,
        "architectures": [family.architecture],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": values.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.count("attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": values.required("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(values),
        "attention_bias": any(name.endswith(".attn_output.bias") for name in shapes),
        "mlp_bias": any(name.endswith(".ffn_down.bias") for name in shapes),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            metadata[key] for end in _END_KEYS if (key := f"tokenizer.ggml.{end}_token_id") in metadata
        ],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return config | family.extra_config(values, config)


def _rope_parameters(values: ArchitectureMetadata) -> dict[str, Any]:
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
