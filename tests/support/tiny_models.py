"""Tiny random checkpoints and a tiny tokenizer, made on the spot: what tests use where weights do not matter.

transformers builds and saves the models, so that its own loader is the reference for ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TinyModelType = Literal["llama", "qwen2", "qwen3", "gemma3_text"]
TINY_MODEL_TYPES: tuple[TinyModelType, ...] = ("llama", "qwen2", "qwen3", "gemma3_text")
TINY_WINDOW = 12  # keys, of the sliding layers of gemma3_text
TINY_VOCAB_SIZE = 320  # 3 special tokens, 256 bytes, 61 merges
TINY_MAX_POSITIONS = 512
TINY_EOS_TOKEN_ID = 2
HABITUAL_TOKENS = (TINY_EOS_TOKEN_ID, *range(259, 299))  # EOS, and merges: printable text

_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TRAINING_TEXT = [
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun",
    "a request is a prompt and a number of tokens; a step computes some tokens of some requests",
    "naïve café, größer, 東京, 🙂 and more: 0123456789",
]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_checkpoint(
    path: Path,
    model_type: TinyModelType,
    *,
    vocab_size: int = TINY_VOCAB_SIZE,
    dtype: Literal["float64", "float32"] = "float64",
    seed: int = 0,
    tie: bool = False,
    **overrides: object,
) -> Path:
    """Write a three-layer model as a safetensors directory (without a tokenizer); returns `path`.

    Two query heads share a KV head; qwen3 and gemma3_text have a head size that is not hidden_size / heads, and
    gemma3_text sliding layers around a full one. Norm weights and biases are random too, so that a tensor that was
    mixed up cannot go unseen. `overrides` are config entries.
    """
    values: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TINY_MAX_POSITIONS,
        "initializer_range": 0.2,
        "tie_word_embeddings": tie,
        "bos_token_id": 0,
        "eos_token_id": TINY_EOS_TOKEN_ID,
        "pad_token_id": 0,
    }
    if model_type == "qwen3":
        values["head_dim"] = 16
    if model_type == "gemma3_text":
        values |= {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": TINY_WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        }
    config = AutoConfig.for_model(model_type, **(values | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def make_tiny_tokenizer(path: Path) -> Path:
    """Write a byte-level BPE tokenizer of TINY_VOCAB_SIZE tokens, with a chat template, into directory
    `path`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_SPECIAL_TOKENS[0],
        pad_token=_SPECIAL_TOKENS[0],
        eos_token=_SPECIAL_TOKENS[TINY_EOS_TOKEN_ID],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(path)
    return path
