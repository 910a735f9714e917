"""The MTP assistant of a Gemma 4 target for training: k draft steps from every position of a row at once.

Step i reads the token i positions on (the text's own: a draft goes on only behind accepted drafts, which are the text)
and the assistant's own output of the step before. All steps see the same keys, those up to the position they start
from. What is learned is the target's distribution at each position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.models.base import CausalLM
from engine.models.gemma4_assistant import ARCHITECTURES
from engine.models.gemma4_config import read_gemma4_config
from engine.models.gemma_config import FULL, SLIDING, GemmaConfig, text_config
from engine.spec_decode.gemma4 import DraftPositionPolicy
from tools.train.attention import as_bias, run_target, visible_keys
from tools.train.gemma4 import GemmaLayer, Rotations, init_weights
from tools.train.rows import Batch

_TEXT_KEYS = (
    "vocab_size",
    "head_dim",
    "global_head_dim",
    "per_layer_config",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "sliding_window",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_activation",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def assistant_config(
    target: Mapping[str, Any],
    *,
    hidden_size: int,
    intermediate_size: int,
    layer_types: Sequence[str],
    dtype: str,
) -> dict[str, Any]:
    """config.json of an assistant with a dense head. `target`: that of the target; heads are as many as its own."""
    text = text_config(target)
    own = {key: text[key] for key in _TEXT_KEYS if key in text}
    if "per_layer_config" in own:  # by the target's layers: say it by type instead
        config = read_gemma4_config(text)
        del own["per_layer_config"]
        own["global_head_dim"] = next(layer.head_size for layer in config.layers if layer.layer_type == FULL)
    own |= {
        "model_type": "gemma4_text",
        "dtype": dtype,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": text["num_attention_heads"],
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_kv_shared_layers": len(layer_types),
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "gemma4_assistant",
        "dtype": dtype,
        "backbone_hidden_size": text["hidden_size"],
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "text_config": own,
    }


class _Body(nn.Module):
    """`model.` of the checkpoint; the table is the head."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GemmaLayer(config, layer, has_own_kv=False) for layer in config.layers)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class AssistantForTraining(nn.Module):
    """Reads the target's cache in the layers that `target.shareable_kv` names. Module names are tensor names."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        target: CausalLM,
        policy: DraftPositionPolicy,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        text = text_config(raw)
        self.config = read_gemma4_config(text)
        self._policy = policy
        size, backbone_size = self.config.hidden_size, target.hidden_size
        self.pre_projection = nn.Linear(2 * backbone_size, size, bias=False)
        self.post_projection = nn.Linear(size, backbone_size, bias=False)
        self.model = _Body(self.config)
        init_weights(self)
        self.to(device=device, dtype=dtype)
        self._rotations = Rotations(self.config, dtype, device)
        self._target = (target,)  # in a tuple: it is not trained
        self._sources = target.shareable_kv()

    def draft_logits(self, batch: Batch, num_steps: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Logits of each step, [num_tokens, vocab_size] each: row t, step i guesses the token t + 2 + i; and the
        target's hidden states, [num_tokens, hidden_size of the target].
        """
        target = self._target[0]
        run = run_target(target, batch)
        windows = {SLIDING: self.config.window + self._policy.extra_window_keys, FULL: None}
        biases = {
            kind: as_bias(visible_keys(batch, windows[kind]), run.hidden.dtype)
            for kind in set(self.config.layer_types)
        }
        rotations = self._rotations(batch.positions.flatten() + self._policy.rope_offset)
        hidden, logits = run.hidden, []
        for step in range(num_steps):
            token_ids = batch.ahead(batch.token_ids, step + 1).flatten()
            x = self.pre_projection(torch.cat((target.embed(token_ids), hidden), dim=-1))
            for kind, layer in zip(self.config.layer_types, self.model.layers, strict=True):
                x, _ = layer(x, rotations[kind], biases[kind], run.keys_values[self._sources[kind]])
            normed = self.model.norm(x)
            logits.append(F.linear(normed, self.model.embed_tokens.weight))
            hidden = self.post_projection(normed)
        return logits, run.hidden
