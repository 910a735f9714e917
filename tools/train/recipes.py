"""Sizes and settings of the models under models/: what `python -m tools.train` takes when nothing else is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.train.optimiser import OptimiserSettings
from tools.train.tokenizer import BOS_ID, EOS_ID, PAD_ID

SLIDING, FULL = "sliding_attention", "full_attention"
VOCAB_SIZE = 8192

# Like E2B, in small: per-layer embeddings; the last layers read the keys and values of the layers before, and are twice
# as wide; the last layer is full. Deep and narrow, as small models should be (arXiv:2402.14905).
TARGET_CONFIG: Mapping[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": 256,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 320,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 12,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 3,
    "num_kv_shared_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "head_dim": 64,
    "global_head_dim": 128,
    "attention_k_eq_v": False,
    "attention_bias": False,
    "enable_moe_block": False,
    "sliding_window": 256,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
ASSISTANT_SHAPE: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "layer_types": [SLIDING, FULL],
}
HEAD_SHAPE: Mapping[str, Any] = {"intermediate_size": 768, "draft_vocab_size": 5120}

TARGET_OPTIMISER = OptimiserSettings(
    learning_rate=4e-3, table_learning_rate=1.5e-3, weight_decay=0.1, table_weight_decay=0.1
)
TARGET_DROPOUT = 0.1
ASSISTANT_OPTIMISER = OptimiserSettings(learning_rate=3e-3, table_learning_rate=2e-3, weight_decay=0.02)
HEAD_OPTIMISER = OptimiserSettings(learning_rate=2e-3, table_learning_rate=5e-4, weight_decay=0.02)

# Most tokens of an answer, drawn in turn: mostly short ones, that come to an end, and some that show what follows.
ANSWER_LENGTHS: tuple[int, ...] = (256, 256, 448, 768)
# An empty answer teaches nothing. And a step with min_tokens in it is sampled outside of the graphs of whole steps,
# which look at the whole vocabulary of every request, whatever its top_k is.
MIN_ANSWER_TOKENS = 1

# Kinds of prompts and their weights: what SmolLM2 is asked, which of its answers the target learns, what it is asked.
TEXT_KINDS: Mapping[str, float] = {
    "story": 3.5,
    "question": 2.2,
    "writing": 0.6,
    "code": 1.2,
    "arithmetic": 0.5,
    "sums": 1.0,
    "translation": 0.3,
    "passage": 0.7,
}
# For a drafter that shall be good at whatever is asked: most is what the model asked itself (asking.py), and long texts
# stand before a question.
BROAD_KINDS: Mapping[str, float] = {
    "asked": 2.6,
    "asked_question": 1.5,
    "asked_translation": 1.2,
    "passage": 0.6,
    "long_passage": 1.2,
    "retrieval": 1.2,
    "story": 0.5,
    "question": 0.6,
    "writing": 0.2,
    "code": 1.0,
    "arithmetic": 0.3,
    "sums": 1.0,
    "translation": 0.2,
}
CHAT_KINDS: Mapping[str, float] = {"story": 3.5, "question": 2.2, "writing": 0.6, "arithmetic": 0.5}
KINDS: Mapping[str, Mapping[str, float]] = {"text": TEXT_KINDS, "chat": CHAT_KINDS, "broad": BROAD_KINDS}
ASKED_LENGTH = 400  # tokens: an article; questions end by themselves
