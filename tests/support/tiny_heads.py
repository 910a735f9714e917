"""EAGLE and EAGLE-3 heads, fitted for a few steps to their small target, and what they compute by definition.

The reference runs over a whole sequence at once, without cache, engine or our layers: dictionaries of tensors and
matrix products. It is differentiable, so the same code fits the heads and checks the speculators.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

Weights = Mapping[str, torch.Tensor]
DRAFT_VOCAB_SIZE = 200  # of EAGLE-3: some of the target's tokens cannot be drafted


@dataclass(frozen=True)
class TargetRun:
    """One sequence through the target, by transformers."""

    token_ids: torch.Tensor  # [T] int64
    logits: torch.Tensor  # [T, vocab_size]
    hidden: torch.Tensor  # [T, D], after the final norm
    aux: tuple[torch.Tensor, ...]  # inputs of layers 2, L // 2, L - 3: [T, D] each


class HeadTarget:
    """A Llama as transformers computes it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = self.model.config
        for module in self.model.modules():
            if type(module).__name__ == "LlamaRMSNorm":  # it computes in float32 whatever the dtype
                module.forward = partial(_norm, weight=module.weight, eps=module.variance_epsilon)
        self.embedding: torch.Tensor = self.model.get_input_embeddings().weight.detach()
        self.head: torch.Tensor = self.model.get_output_embeddings().weight.detach()
        self.dtype = self.embedding.dtype

    @torch.no_grad()
    def run(self, token_ids: torch.Tensor) -> TargetRun:
        output = self.model(token_ids[None], output_hidden_states=True)
        num_layers = self.config.num_hidden_layers
        layers = (2, num_layers // 2, num_layers - 3)
        hidden = [states[0] for states in output.hidden_states]
        return TargetRun(token_ids, output.logits[0], hidden[-1], tuple(hidden[layer] for layer in layers))


class TinyTarget(HeadTarget):
    """Of a checkpoint."""

    def __init__(self, path: Path) -> None:
        super().__init__(AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval())


@dataclass(frozen=True)
class HeadRows:
    """What a head makes of rows p = (h_p, x_{p+1})."""

    logits: torch.Tensor  # [T, vocab_size]; row p guesses x_{p+2}; -inf outside the draft vocabulary
    feedback: torch.Tensor  # [T, D]; what stands for h_{p+1} where the target has not been yet


class HeadReference(ABC):
    """A head over a whole sequence, by its definition."""

    def __init__(self, weights: Weights, target: HeadTarget) -> None:
        self.weights = weights
        self.target = target

    @abstractmethod
    def inputs(self, run: TargetRun) -> torch.Tensor:
        """What the head reads of the target: [T, D]."""

    @abstractmethod
    def rows(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> HeadRows:
        """token_ids [T] int64, of the tokens after the hidden states [T, D]."""

    def over(self, run: TargetRun) -> HeadRows:
        """T - 1 rows: every token but the first, each with the target's hidden state before it."""
        return self.rows(run.token_ids[1:], self.inputs(run)[:-1])

    def draft_logits(self, run: TargetRun, drafts: Sequence[int]) -> torch.Tensor:
        """Logits of len(drafts) + 1 draft steps after the sequence, [len(drafts) + 1, vocab_size].

        Step i >= 1 reads draft i - 1 and the head's own output of the step before; the context below is the target's.
        """
        token_ids, hidden = run.token_ids[1:], self.inputs(run)[:-1]
        steps = []
        for draft in (*drafts, None):
            rows = self.rows(token_ids, hidden)
            steps.append(rows.logits[-1])
            if draft is not None:
                token_ids = torch.cat((token_ids, torch.tensor([draft])))
                hidden = torch.cat((hidden, rows.feedback[-1:]))
        return torch.stack(steps)


class EagleReference(HeadReference):
    def inputs(self, run: TargetRun) -> torch.Tensor:
        return run.hidden

    def rows(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> HeadRows:
        weights, target = self.weights, self.target
        pair = torch.cat((target.embedding[token_ids], hidden), dim=-1)
        x = pair @ weights["fc.weight"].T + weights["fc.bias"]
        out = _block(weights, "layers.0.", x, x, target.config)
        return HeadRows(out @ target.head.T, out)


class Eagle3Reference(HeadReference):
    def inputs(self, run: TargetRun) -> torch.Tensor:
        return torch.cat(run.aux, dim=-1) @ self.weights["fc.weight"].T

    def rows(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> HeadRows:
        weights, target = self.weights, self.target
        eps = target.config.rms_norm_eps
        pair = torch.cat(
            (
                _norm(target.embedding[token_ids], weights["midlayer.input_layernorm.weight"], eps),
                _norm(hidden, weights["midlayer.hidden_norm.weight"], eps),
            ),
            dim=-1,
        )
        out = _block(weights, "midlayer.", pair, hidden, target.config)
        own = _norm(out, weights["norm.weight"], eps) @ weights["lm_head.weight"].T
        target_ids = torch.arange(DRAFT_VOCAB_SIZE) + weights["d2t"]
        full = own.new_full((len(own), len(target.embedding)), float("-inf"))
        return HeadRows(full.index_copy(1, target_ids, own), out)


REFERENCES: Mapping[str, type[HeadReference]] = {"eagle": EagleReference, "eagle3": Eagle3Reference}


def make_tiny_head(
    path: Path,
    method: str,
    target: HeadTarget,
    sequences: Sequence[Sequence[int]],
    *,
    steps: int = 240,
    learning_rate: float = 1e-2,
    std: float = 0.1,
) -> HeadReference:
    """Fit a head to what the target says along `sequences` (too few steps to learn all of it), and save it under the
    names that released heads use. `std`: of the random weights that it begins with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = (
            _eagle_weights(target, std) if method == "eagle" else _eagle3_weights(target, sequences, std)
        )
    reference = REFERENCES[method](weights, target)
    runs = [target.run(torch.tensor(sequence)) for sequence in sequences]
    trained = [weight.requires_grad_() for weight in weights.values() if weight.is_floating_point()]
    optimiser = torch.optim.Adam(trained, lr=learning_rate)
    for step in range(steps):
        run = runs[step % len(runs)]
        logits = reference.over(run).logits
        drafted = logits[0].isfinite()
        wanted = run.logits[1:, drafted].softmax(-1)  # row p of the head guesses as row p + 1 of the target
        loss = F.cross_entropy(logits[:, drafted], wanted)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    weights = {name: weight.detach() for name, weight in weights.items()}
    path.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(head_config(method, target), default=str))
    return REFERENCES[method](weights, target)


def head_config(method: str, target: HeadTarget) -> dict[str, Any]:
    """config.json of a head."""
    config: dict[str, Any] = target.config.to_dict() | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    if method == "eagle3":
        config["draft_vocab_size"] = DRAFT_VOCAB_SIZE
    return config


def _eagle_weights(target: HeadTarget, std: float) -> dict[str, torch.Tensor]:
    size = target.config.hidden_size
    fc = torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1).to(target.dtype)
    return {
        "fc.weight": fc + 0.02 * torch.randn_like(fc),
        "fc.bias": torch.zeros(size, dtype=target.dtype),
        **_block_weights(target, "layers.0.", size, std),
    }


def _eagle3_weights(
    target: HeadTarget, sequences: Sequence[Sequence[int]], std: float
) -> dict[str, torch.Tensor]:
    """The draft vocabulary is what the sequences use most, as in released heads."""
    size = target.config.hidden_size
    used = torch.tensor([token for sequence in sequences for token in sequence])
    counts = used.bincount(minlength=target.config.vocab_size)
    chosen = counts.argsort(descending=True, stable=True)[:DRAFT_VOCAB_SIZE].sort().values
    ones = torch.ones(size, dtype=target.dtype)
    return {
        "fc.weight": std * torch.randn(size, 3 * size, dtype=target.dtype),
        "midlayer.input_layernorm.weight": ones.clone(),
        "midlayer.hidden_norm.weight": ones.clone(),
        **_block_weights(target, "midlayer.", 2 * size, std),
        "norm.weight": ones.clone(),
        "lm_head.weight": target.head[chosen].clone(),
        "d2t": chosen - torch.arange(DRAFT_VOCAB_SIZE),
        "t2d": torch.zeros(target.config.vocab_size, dtype=torch.bool).index_fill(0, chosen, True),
    }


def _block_weights(target: HeadTarget, prefix: str, attention_in: int, std: float) -> dict[str, torch.Tensor]:
    config = target.config
    size, head_size = config.hidden_size, config.hidden_size // config.num_attention_heads
    query, kv = config.num_attention_heads * head_size, config.num_key_value_heads * head_size
    shapes = {
        "self_attn.q_proj": (query, attention_in),
        "self_attn.k_proj": (kv, attention_in),
        "self_attn.v_proj": (kv, attention_in),
        "self_attn.o_proj": (size, query),
        "mlp.gate_proj": (config.intermediate_size, size),
        "mlp.up_proj": (config.intermediate_size, size),
        "mlp.down_proj": (size, config.intermediate_size),
    }
    weights = {
        f"{prefix}{name}.weight": std * torch.randn(shape, dtype=target.dtype)
        for name, shape in shapes.items()
    }
    weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(size, dtype=target.dtype)
    return weights


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def _block(
    weights: Weights, prefix: str, x: torch.Tensor, residual: torch.Tensor, config: Any
) -> torch.Tensor:
    """residual + attention(x), then + mlp(norm). x: [T, any]; residual: [T, D]."""
    head_size = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads

    def heads(name: str) -> torch.Tensor:
        return (x @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).view(len(x), -1, head_size)

    query, key, value = _rope(heads("q"), config), _rope(heads("k"), config), heads("v")
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * head_size**-0.5
    scores = scores.masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(len(x), -1)
    hidden = residual + mixed @ weights[f"{prefix}self_attn.o_proj.weight"].T
    normed = _norm(hidden, weights[f"{prefix}post_attention_layernorm.weight"], config.rms_norm_eps)
    gate = F.silu(normed @ weights[f"{prefix}mlp.gate_proj.weight"].T)
    up = normed @ weights[f"{prefix}mlp.up_proj.weight"].T
    return hidden + (gate * up) @ weights[f"{prefix}mlp.down_proj.weight"].T


def _rope(x: torch.Tensor, config: Any) -> torch.Tensor:
    size = x.shape[-1]
    theta = config.rope_parameters["rope_theta"]
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.arange(len(x), dtype=torch.float32)[:, None] * frequencies
    cosine, sine = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
