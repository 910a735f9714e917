"""What Gemma 4 and its MTP assistant compute, by definition: dictionaries of tensors, matrix products, whole sequences.

It knows no cache, no engine and none of our layers, reads the released config spelling only, and is differentiable, so
that the same code fits tiny assistants and checks the speculator. All of it has the dtype of the weights, but for the
rotary angles, which are float32 in every implementation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

Weights = Mapping[str, torch.Tensor]
KeysValues = tuple[torch.Tensor, torch.Tensor]  # [T, num_kv_heads, head_size] each, normed and rotated
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class PositionPolicy:
    """Where a draft step stands, relative to the last position with keys and values."""

    rope_offset: int
    extra_window_keys: int


POLICIES = {"last_key": PositionPolicy(0, 0), "last_token": PositionPolicy(1, 1)}


@dataclass(frozen=True)
class TargetRun:
    """One sequence through the target, or several behind each other."""

    token_ids: torch.Tensor  # [T] int64
    hidden: torch.Tensor  # [T, D], after the final norm
    logits: torch.Tensor  # [T, vocab_size]
    kv: Mapping[str, KeysValues]  # by layer type, of the last layer that has them: what an assistant reads
    starts: torch.Tensor  # [T] int64, index of the first token of each token's sequence


def pack(runs: Sequence[TargetRun]) -> TargetRun:
    """Several runs as one: a row sees the keys of its own sequence."""
    firsts = [0, *accumulate(len(run.token_ids) for run in runs)]
    return TargetRun(
        token_ids=torch.cat([run.token_ids for run in runs]),
        hidden=torch.cat([run.hidden for run in runs]),
        logits=torch.cat([run.logits for run in runs]),
        kv={
            kind: (torch.cat([run.kv[kind][0] for run in runs]), torch.cat([run.kv[kind][1] for run in runs]))
            for kind in runs[0].kv
        },
        starts=torch.cat([run.starts + first for run, first in zip(runs, firsts, strict=False)]),
    )


def norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Over the last dimension; the weight is plain, not one plus it."""
    scaled = x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return scaled if weight is None else scaled * weight


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


class _Decoder:
    """What target and assistant have in common. `config`: of the text decoder."""

    def __init__(self, weights: Weights, config: Mapping[str, Any]) -> None:
        self.weights = weights
        self.config = config
        self.kinds: list[str] = config["layer_types"]
        self.eps: float = config["rms_norm_eps"]

    def weight(self, layer: int, name: str) -> torch.Tensor:
        return self.weights[f"model.layers.{layer}.{name}"]

    def layer_norm(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.weight(layer, f"{name}.weight"), self.eps)

    def heads(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        """[T, num_heads, head_size] of x: [T, D]."""
        size = self.config["global_head_dim" if self.kinds[layer] == FULL else "head_dim"]
        return (x @ self.weight(layer, f"self_attn.{name}.weight").T).view(len(x), -1, size)

    def rotate(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: [T, num_heads, head_size]; feature i turns with feature i + head_size / 2."""
        angles = positions[:, None, None].float() * self._frequencies(layer, x.shape[-1])
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def _frequencies(self, layer: int, size: int) -> torch.Tensor:
        """[size / 2] float32: a proportional rope turns the first features only, by exponents over the whole head."""
        parameters = self.config["rope_parameters"][self.kinds[layer]]
        frequencies: torch.Tensor = 1.0 / parameters["rope_theta"] ** (
            torch.arange(0, size, 2).float() / size
        )
        if parameters["rope_type"] == "proportional":
            frequencies[int(parameters["partial_rotary_factor"] * size // 2) :] = 0.0
        return frequencies

    def attend(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor, kv: KeysValues, visible: torch.Tensor
    ) -> torch.Tensor:
        """x: [n, D], not yet normed; visible: [n, T] bool. Unscaled scores, no soft cap."""
        query = self.heads(layer, "q_proj", self.layer_norm(layer, "input_layernorm", x))
        query = self.rotate(layer, self.layer_norm(layer, "self_attn.q_norm", query), positions)
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in kv)
        scores = torch.einsum("nhd,thd->nht", query, key).masked_fill(~visible[:, None], float("-inf"))
        mixed = torch.einsum("nht,thd->nhd", scores.softmax(-1), value)
        return mixed.flatten(1) @ self.weight(layer, "self_attn.o_proj.weight").T

    def layer(
        self,
        layer: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv: KeysValues,
        visible: torch.Tensor,
        layer_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [n, D]; layer_input: [n, per-layer size]. Returns the shape of x."""
        attended = self.attend(layer, x, positions, kv, visible)
        x = x + self.layer_norm(layer, "post_attention_layernorm", attended)
        normed = self.layer_norm(layer, "pre_feedforward_layernorm", x)
        gate, up, down = (self.weight(layer, f"mlp.{name}_proj.weight").T for name in ("gate", "up", "down"))
        branch = (gelu(normed @ gate) * (normed @ up)) @ down
        if self.config.get("enable_moe_block"):
            branch = self.layer_norm(layer, "post_feedforward_layernorm_1", branch)
            branch = branch + self.layer_norm(layer, "post_feedforward_layernorm_2", self._experts(layer, x))
        x = x + self.layer_norm(layer, "post_feedforward_layernorm", branch)
        if layer_input is not None:
            gated = gelu(x @ self.weight(layer, "per_layer_input_gate.weight").T) * layer_input
            projected = gated @ self.weight(layer, "per_layer_projection.weight").T
            x = x + self.layer_norm(layer, "post_per_layer_input_norm", projected)
        return x * self.weight(layer, "layer_scalar")

    def _experts(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """All experts for all rows; those that were not chosen weigh nothing. x: the residual, not normed."""
        scaled = norm(x, None, self.eps) * self.weight(layer, "router.scale") * x.shape[-1] ** -0.5
        shares = (scaled @ self.weight(layer, "router.proj.weight").T).softmax(-1)
        best, chosen = shares.topk(self.config["top_k_experts"], dim=-1)
        best = best / best.sum(-1, keepdim=True) * self.weight(layer, "router.per_expert_scale")[chosen]
        factors = torch.zeros_like(shares).scatter(1, chosen, best)
        normed = self.layer_norm(layer, "pre_feedforward_layernorm_2", x)
        gate, up = torch.einsum("nd,eid->nei", normed, self.weight(layer, "experts.gate_up_proj")).chunk(
            2, -1
        )
        outputs = torch.einsum("nei,edi->ned", gelu(gate) * up, self.weight(layer, "experts.down_proj"))
        return (outputs * factors[..., None]).sum(dim=1)


class Gemma4Reference(_Decoder):
    """The target."""

    @classmethod
    def load(cls, path: Path) -> Gemma4Reference:
        """A text-only checkpoint in the released spelling."""
        return cls(load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text()))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] int64 -> [n, D], scaled by the root of D as rounded to the dtype."""
        table = self.weights["model.embed_tokens.weight"]
        return table[token_ids] * torch.tensor(math.sqrt(table.shape[1]), dtype=table.dtype)

    def run(self, token_ids: torch.Tensor) -> TargetRun:
        """token_ids: [T] int64."""
        positions = torch.arange(len(token_ids))
        distance = positions[:, None] - positions
        visible = {FULL: distance >= 0, SLIDING: (distance >= 0) & (distance < self.config["sliding_window"])}
        x = self.embed(token_ids)
        layer_inputs = (
            self._layer_inputs(token_ids, x) if self.config["hidden_size_per_layer_input"] else None
        )
        first_shared = len(self.kinds) - self.config["num_kv_shared_layers"]
        kv: dict[str, KeysValues] = {}
        for layer, kind in enumerate(self.kinds):
            if layer < first_shared:
                kv[kind] = self._keys_values(layer, x, positions)
            layer_input = None if layer_inputs is None else layer_inputs[:, layer]
            x = self.layer(layer, x, positions, kv[kind], visible[kind], layer_input)
        hidden = norm(x, self.weights["model.norm.weight"], self.eps)
        cap = self.config["final_logit_softcapping"]
        logits = torch.tanh(hidden @ self.weights["model.embed_tokens.weight"].T / cap) * cap
        return TargetRun(token_ids, hidden, logits, kv, starts=torch.zeros_like(token_ids))

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The prompt and what follows it."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.run(torch.tensor(tokens)).logits[-1].argmax()))
        return tokens

    def _keys_values(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> KeysValues:
        normed = self.layer_norm(layer, "input_layernorm", x)
        raw_key = self.heads(layer, "k_proj", normed)
        is_equal = self.config["attention_k_eq_v"] and self.kinds[layer] == FULL
        raw_value = raw_key if is_equal else self.heads(layer, "v_proj", normed)
        key = self.rotate(layer, self.layer_norm(layer, "self_attn.k_norm", raw_key), positions)
        return key, norm(raw_value, None, self.eps)

    def _layer_inputs(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[T, num_layers, per-layer size]. x: scaled embeddings, [T, D]."""
        size: int = self.config["hidden_size_per_layer_input"]
        shape = (len(token_ids), len(self.kinds), size)
        of_token = self.weights["model.embed_tokens_per_layer.weight"][token_ids] * math.sqrt(size)
        projected = x @ self.weights["model.per_layer_model_projection.weight"].T * x.shape[-1] ** -0.5
        weight = self.weights["model.per_layer_projection_norm.weight"]
        return (norm(projected.view(shape), weight, self.eps) + of_token.view(shape)) * 2**-0.5


class AssistantReference(_Decoder):
    """The drafter. `raw`: its whole config.json. A row stands for a request at any position of a target's run."""

    def __init__(self, weights: Weights, raw: Mapping[str, Any], target: Gemma4Reference) -> None:
        super().__init__(weights, raw["text_config"])
        self.raw = raw
        self.target = target

    @classmethod
    def load(cls, path: Path, target: Gemma4Reference) -> AssistantReference:
        raw = json.loads((path / "config.json").read_text())
        return cls(load_file(path / "model.safetensors"), raw, target)

    def step(
        self,
        run: TargetRun,
        last_keys: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        policy: PositionPolicy,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """last_keys, token_ids: [n] int64; hidden: [n, D of the target]. Row i sees the keys up to last_keys[i].

        Returns (for the head [n, own D], fed back [n, D of the target]).
        """
        keys, starts = torch.arange(len(run.token_ids)), run.starts[last_keys]
        seen = (keys <= last_keys[:, None]) & (keys >= starts[:, None])
        window = self.config["sliding_window"] + policy.extra_window_keys
        visible = {FULL: seen, SLIDING: seen & (keys > last_keys[:, None] - window)}
        x = (
            torch.cat((self.target.embed(token_ids), hidden), dim=-1)
            @ self.weights["pre_projection.weight"].T
        )
        positions = last_keys - starts + policy.rope_offset
        for layer, kind in enumerate(self.kinds):
            x = self.layer(layer, x, positions, run.kv[kind], visible[kind])
        normed = norm(x, self.weights["model.norm.weight"], self.eps)
        return normed, normed @ self.weights["post_projection.weight"].T

    def along(
        self, run: TargetRun, last_keys: torch.Tensor, token_ids: torch.Tensor, policy: PositionPolicy
    ) -> list[torch.Tensor]:
        """A chain of steps over given tokens. token_ids: [n, k] int64, the one behind `last_keys` and drafts; returns
        for each of k steps what the head reads, [n, own D]."""
        hidden = run.hidden[last_keys]
        steps = []
        for column in token_ids.unbind(1):
            normed, hidden = self.step(run, last_keys, column, hidden, policy)
            steps.append(normed)
        return steps

    def chain(
        self, run: TargetRun, last_keys: torch.Tensor, token_ids: torch.Tensor, k: int, policy: PositionPolicy
    ) -> torch.Tensor:
        """Greedy drafts, [n, k] int64. token_ids: [n] int64, those behind `last_keys`."""
        hidden = run.hidden[last_keys]
        drafts: list[torch.Tensor] = []
        for _ in range(k):
            newest = drafts[-1] if drafts else token_ids
            normed, hidden = self.step(run, last_keys, newest, hidden, policy)
            drafts.append(self.logits(normed).argmax(-1))
        return torch.stack(drafts, dim=1)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[n, own D] -> [n, vocab_size]; -inf for tokens that a sparse head does not reach."""
        head = self.weights["model.embed_tokens.weight"]
        if not self.raw["use_ordered_embeddings"]:
            return normed @ head.T
        nearest = self.centroid_logits(normed).topk(self.raw["centroid_intermediate_top_k"], dim=-1).indices
        clusters = self.weights["masked_embedding.token_ordering"].view(self.raw["num_centroids"], -1)
        token_ids = clusters[nearest].flatten(1)
        scores = (head[token_ids] * normed[:, None]).sum(-1)
        return scores.new_full((len(normed), len(head)), float("-inf")).scatter(1, token_ids, scores)

    def centroid_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[n, own D] -> [n, num_centroids]."""
        return normed @ self.weights["masked_embedding.centroids.weight"].T
