"""Writes tiny GGUF files as llama.cpp's converter would: its tensor names, its row order, its metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.torch import load_file

_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ARCHITECTURES = {"gemma3_text": "gemma3"}  # by model type, where the converter calls it something else


def write_tiny_gguf(
    path: Path,
    checkpoint: Path,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Convert a directory of make_tiny_checkpoint, and its tokenizer if there; matrices get `quantization`.

    `metadata`: string or integer entries that replace those of the converter; None leaves an entry out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = _architecture(config)
    writer = GGUFWriter(path, architecture)
    for key, value in (_metadata(config) | (metadata or {})).items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_string(key, value)
    if (checkpoint / "tokenizer.json").exists():
        _add_tokenizer(writer, checkpoint)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        values = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = _interleave_rotary(values, config["num_attention_heads"])
        elif architecture == "llama" and ".k_proj." in name:
            values = _interleave_rotary(values, config["num_key_value_heads"])
        elif architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1.0
        kind = quantization if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name, architecture), quantize(values, kind), raw_dtype=kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, architecture: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    names = _GEMMA3_LAYER_NAMES if architecture == "gemma3" else _LAYER_NAMES
    return f"blk.{layer}.{names[module]}.{kind}"


def _architecture(config: dict[str, Any]) -> str:
    model_type: str = config["model_type"]
    return _ARCHITECTURES.get(model_type, model_type)


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    entries = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        "attention.key_length": config["head_dim"] if config.get("head_dim") else None,
        "attention.sliding_window": config.get("sliding_window"),
    }
    tokens = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    return {f"{_architecture(config)}.{key}": value for key, value in entries.items()} | {
        f"tokenizer.ggml.{key}": value for key, value in tokens.items()
    }


def _add_tokenizer(writer: GGUFWriter, checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())


def _interleave_rotary(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """The converter's row order: feature i of a head is followed by feature i + head_size / 2."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
