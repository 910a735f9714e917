"""The EAGLE-3 head for training (arXiv:2503.01840, "training-time test"): draft steps on the head's own outputs.

Step 0 runs every row as the engine's draft prefill does. In step i the row that began at t stands at position t + i:
it sees the keys of step 0 up to t, and one key of each step since, its own. Module names are the tensor names of
released heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.rotary import rotate_reference
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.models.base import CausalLM
from engine.models.decoder_config import DecoderConfig
from tools.train.attention import KeysValues, TargetRun, as_bias, attend, run_target, visible_keys
from tools.train.gemma4 import init_weights
from tools.train.rows import Batch

_INIT_NORM = 0.5  # of the last norm: the first guesses are not sure of themselves
_CONFIG_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "bos_token_id",
    "eos_token_id",
)


def head_config(
    target: Mapping[str, Any],
    *,
    intermediate_size: int,
    draft_vocab_size: int,
    aux_layers: Sequence[int],
    dtype: str,
    shares_target_head: bool = False,
) -> dict[str, Any]:
    """config.json of a head. `target`: that of the target."""
    own = {key: target[key] for key in _CONFIG_KEYS if target.get(key) is not None}
    shared = {"shares_target_head": True} if shares_target_head else {}
    return own | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": dtype,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers),
        **shared,
    }


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, head_size = config.hidden_size, config.head_size
        self._head_size = head_size
        self.q_proj = nn.Linear(2 * size, config.num_heads * head_size, bias=False)
        self.k_proj = nn.Linear(2 * size, config.num_kv_heads * head_size, bias=False)
        self.v_proj = nn.Linear(2 * size, config.num_kv_heads * head_size, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_size, size, bias=False)

    def query(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return rotate_reference(self._heads(self.q_proj(x)), *rotation)

    def keys_values(self, x: torch.Tensor, rotation: Rotation) -> KeysValues:
        return rotate_reference(self._heads(self.k_proj(x)), *rotation), self._heads(self.v_proj(x))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self._head_size)


class _MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class _MidLayer(nn.Module):
    """Attention over [norm(embedding), norm(hidden)], then the MLP; the residual is the hidden state."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self._scale = config.head_size**-0.5
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = _MLP(config)

    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        rotation: Rotation,
        before: Sequence[KeysValues],
        bias: torch.Tensor,
    ) -> tuple[torch.Tensor, KeysValues]:
        """embedding, hidden: [num_tokens, hidden_size]; before: keys and values of earlier steps; bias: [num_rows, 1,
        row_length, (len(before) + 1) * row_length]. Returns the output and this step's keys and values.
        """
        pair = torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), dim=-1)
        own = self.self_attn.keys_values(pair, rotation)
        key, value = (_by_row(list(parts), len(bias)) for parts in zip(*before, own, strict=True))
        query = self.self_attn.query(pair, rotation)
        x = hidden + self.self_attn.o_proj(attend(query, key, value, bias, self._scale))
        return x + self.mlp(self.post_attention_layernorm(x)), own


def _by_row(parts: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
    """Keys of all steps, step behind step within each row: [num_rows * steps * row_length, heads, head_size]."""
    return torch.cat([part.view(num_rows, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


class Eagle3ForTraining(nn.Module):
    """A head. `target_ids`: [draft_vocab_size] int64, ascending, the tokens that it can draft. It has an output head of
    its own, which begins as the target's, unless the config says that it shares the target's.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        target: CausalLM,
        target_ids: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = DecoderConfig.from_raw(raw)
        self.aux_layers: list[int] = list(raw["eagle_aux_hidden_state_layer_ids"])
        size = self.config.hidden_size
        self.fc = nn.Linear(len(self.aux_layers) * size, size, bias=False)
        self.midlayer = _MidLayer(self.config)
        self.norm = nn.RMSNorm(size, self.config.rms_norm_eps)
        self._has_own_head = not raw.get("shares_target_head", False)
        if self._has_own_head:
            self.lm_head = nn.Linear(size, len(target_ids), bias=False)
        init_weights(self)
        self.to(device=device, dtype=dtype)
        self._rotary = RotaryEmbedding(self.config.rope, dtype=dtype, device=device)
        self.target_ids = target_ids.to(device)
        self._target = (target,)  # in a tuple: it is not trained
        self._aux_scale = torch.ones(len(self.aux_layers) * size, dtype=dtype, device=device)
        with torch.no_grad():
            self.norm.weight.fill_(_INIT_NORM)
            self._target_head = head_rows(target, self.target_ids)  # [draft_vocab_size, hidden_size]
            if self._has_own_head:
                self.lm_head.weight.copy_(self._target_head)

    def draft_logits(self, batch: Batch, num_steps: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Logits over the draft vocabulary of each step, [num_tokens, draft_vocab_size] each: row t, step i guesses the
        token t + 2 + i; and the target's hidden states, [num_tokens, hidden_size].
        """
        target = self._target[0]
        run = run_target(target, batch, self.aux_layers)
        hidden = self.fc(self._joined_aux(run) * self._aux_scale)
        seen = visible_keys(batch)
        own_key = torch.eye(seen.shape[1], dtype=torch.bool, device=seen.device).expand_as(seen)
        positions = batch.positions.flatten()
        before: list[KeysValues] = []
        logits = []
        for step in range(num_steps):
            token_ids = batch.ahead(batch.token_ids, step + 1).flatten()
            bias = as_bias(torch.cat((seen, *[own_key] * step), dim=-1), hidden.dtype)
            rotation = self._rotary(positions + step)
            hidden, keys_values = self.midlayer(target.embed(token_ids), hidden, rotation, before, bias)
            before.append(keys_values)
            output_head = self.lm_head.weight if self._has_own_head else self._target_head
            logits.append(F.linear(self.norm(hidden), output_head))
        return logits, run.hidden

    @torch.no_grad()
    def calibrate(self, batch: Batch) -> None:
        """Let `fc` learn on inputs of size one, whatever the target's are: some features of a residual stream are a
        hundred times the others. The checkpoint's weight holds the factors."""
        aux = self._joined_aux(run_target(self._target[0], batch, self.aux_layers))
        wide = aux.to(torch.promote_types(aux.dtype, torch.float32))
        size = wide[batch.is_learned.flatten()].square().mean(dim=0).sqrt()
        self._aux_scale = (1.0 / size.clamp(min=1e-3)).to(self._aux_scale.dtype)

    @torch.no_grad()
    def begin_with(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over what another head has learned, after `calibrate`. `weights`: its checkpoint. Of its output head the
        rows of tokens that both can draft. Raises ValueError for tensors that are missing or of other shapes."""
        own = self.state_dict()
        given = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
        for name, weight in own.items():
            if name == "lm_head.weight":
                self._take_head_rows(given)
                continue
            shape = list(given[name].shape) if name in given else "nothing"
            if shape != list(weight.shape):
                raise ValueError(
                    f"the head to begin with, {name}: got {shape}, expected {list(weight.shape)}"
                )
            scale = self._aux_scale.cpu().to(given[name].dtype) if name == "fc.weight" else 1.0
            weight.copy_(given[name] / scale)

    def _take_head_rows(self, given: Mapping[str, torch.Tensor]) -> None:
        if "lm_head.weight" not in given:
            return
        given_ids = torch.arange(len(given["lm_head.weight"]))
        if "d2t" in given:  # else it drafts all tokens
            given_ids = given_ids + given["d2t"]
        places = torch.full((self.config.vocab_size,), -1, dtype=torch.int64)
        places[given_ids] = torch.arange(len(given_ids))
        place = places[self.target_ids.cpu()]
        rows = given["lm_head.weight"][place[place >= 0]]
        head = self.lm_head.weight
        head[(place >= 0).to(head.device)] = rows.to(device=head.device, dtype=head.dtype)

    def _joined_aux(self, run: TargetRun) -> torch.Tensor:
        """[num_tokens, len(aux_layers) * hidden_size]"""
        return torch.cat([run.aux[layer] for layer in self.aux_layers], dim=-1)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits of the tokens that can be drafted, [num_tokens, draft_vocab_size]."""
        return F.linear(hidden, self._target_head)

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """The tensors of a released head, with the maps between both vocabularies."""
        can_draft = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        ids = self.target_ids.cpu()
        can_draft[ids] = True
        offsets = ids - torch.arange(len(ids))
        wide = torch.promote_types(self._aux_scale.dtype, torch.float32)
        folded = self.fc.weight.detach().to(wide) * self._aux_scale.to(wide)
        return {**self.state_dict(), "fc.weight": folded, "d2t": offsets, "t2d": can_draft}


def head_rows(target: CausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """Rows of the target's output head, [n, hidden_size], whatever it is called: a head is linear."""
    eye = torch.eye(target.hidden_size, dtype=target.embed(token_ids[:1]).dtype, device=token_ids.device)
    return target.compute_logits(eye)[:, token_ids].T.to(eye.dtype).contiguous()
