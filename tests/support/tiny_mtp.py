"""Targets with a layer that drafts: small ones with habits, the layer fitted to them, and what it computes by
definition over a whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from tests.support.tiny_heads import HeadReference, HeadRows, TargetRun
from tests.support.tiny_models import HABITUAL_TOKENS, TINY_EOS_TOKEN_ID
from tests.support.tiny_moe import (
    Config,
    TinyMoEKind,
    Weights,
    decoder_layer,
    make_tiny_moe,
    norm,
    read_checkpoint,
    reference_hidden,
    write_tensors,
)

MTP_KINDS: Mapping[str, TinyMoEKind] = {"deepseek_v3": "deepseek_v3_yarn", "glm4_moe": "glm4_moe"}


def make_habitual_moe(path: Path, kind: TinyMoEKind) -> Path:
    """The newest token matters most, and a few tokens get nearly all probability: texts fall into loops."""
    make_tiny_moe(path, kind)
    _, weights = read_checkpoint(path)
    weights["model.embed_tokens.weight"] *= 4.0
    head = weights["lm_head.weight"]
    habitual = torch.zeros(len(head), dtype=torch.bool)
    habitual[list(HABITUAL_TOKENS)] = True
    head *= torch.where(habitual, 2.5, 0.1)[:, None]
    head[TINY_EOS_TOKEN_ID] *= 0.3
    write_tensors(path, weights)
    return path


MTP_TARGET_MAKERS = {family: partial(make_habitual_moe, kind=kind) for family, kind in MTP_KINDS.items()}


class MoETarget:
    """A checkpoint, by the definition."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.weights = read_checkpoint(path)
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights["lm_head.weight"]
        self._runs: list[TargetRun] = []

    @torch.no_grad()
    def run(self, token_ids: torch.Tensor) -> TargetRun:
        """Of a sequence that another one begins with, the beginning of that one's: nothing looks ahead."""
        length = len(token_ids)
        for known in self._runs:
            if torch.equal(known.token_ids[:length], token_ids):
                return TargetRun(token_ids, known.logits[:length], known.hidden[:length], ())
        hidden = reference_hidden(self.config, self.weights, token_ids)
        self._runs.append(TargetRun(token_ids, hidden @ self.head.T, hidden, ()))
        return self._runs[-1]

    @property
    def mtp_prefix(self) -> str:
        return f"model.layers.{self.config['num_hidden_layers']}."


class MTPReference(HeadReference):
    """`weights`: the layer's own, by their names in the checkpoint."""

    def __init__(self, weights: Weights, target: MoETarget) -> None:
        self.weights = weights
        self._target = target

    def inputs(self, run: TargetRun) -> torch.Tensor:
        return run.hidden

    def rows(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> HeadRows:
        target, weights, prefix = self._target, self.weights, self._target.mtp_prefix
        config: Config = target.config
        eps = config["rms_norm_eps"]
        pair = (
            norm(target.embedding[token_ids], weights[f"{prefix}enorm.weight"], eps),
            norm(hidden, weights[f"{prefix}hnorm.weight"], eps),
        )
        x = torch.cat(pair, dim=-1) @ weights[f"{prefix}eh_proj.weight"].T
        out = norm(
            decoder_layer(config, weights, prefix, x, has_experts=True),
            weights[f"{prefix}shared_head.norm.weight"],
            eps,
        )
        return HeadRows(out @ target.head.T, out)


def add_mtp_layer(
    target: MoETarget, sequences: Sequence[Sequence[int]], *, steps: int = 400, learning_rate: float = 1e-2
) -> MTPReference:
    """Fit the layer to what the target says along `sequences`, too few steps to learn all of it, and add it to the
    target's checkpoint with the copies of embedding and head that released ones hold."""
    weights = _new_layer(target)
    reference = MTPReference(weights, target)
    runs = [target.run(torch.tensor(sequence)) for sequence in sequences]
    optimiser = torch.optim.Adam([weight.requires_grad_() for weight in weights.values()], lr=learning_rate)
    for step in range(steps):
        run = runs[step % len(runs)]
        # Row p guesses as row p + 1 of the target.
        loss = F.cross_entropy(reference.over(run).logits, run.logits[1:].softmax(-1))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    weights = {name: weight.detach() for name, weight in weights.items()}
    prefix = target.mtp_prefix
    copies = {
        f"{prefix}embed_tokens.weight": target.embedding.clone(),
        f"{prefix}shared_head.head.weight": target.head.clone(),
    }
    write_tensors(target.path, {**target.weights, **weights, **copies})
    return MTPReference(weights, target)


def _new_layer(target: MoETarget) -> dict[str, torch.Tensor]:
    """A copy of the target's last layer between new norms and a product that lets the hidden state pass."""
    prefix, size = target.mtp_prefix, target.config["hidden_size"]
    last = f"model.layers.{target.config['num_hidden_layers'] - 1}."
    generator = torch.Generator().manual_seed(0)
    ones = torch.ones(size, dtype=torch.float64)
    passing = torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1)
    noise = 0.02 * torch.randn(passing.shape, generator=generator)
    layer = {
        prefix + name.removeprefix(last): weight.clone()
        for name, weight in target.weights.items()
        if name.startswith(last)
    }
    return layer | {
        f"{prefix}enorm.weight": ones.clone(),
        f"{prefix}hnorm.weight": ones.clone(),
        f"{prefix}eh_proj.weight": (passing + noise).to(torch.float64),
        f"{prefix}shared_head.norm.weight": ones.clone(),
    }
