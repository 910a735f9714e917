"""A decoder whose later layers have routed experts beside a shared one (DeepSeekMoE, arXiv:2401.06066), and whose
checkpoint may hold further layers that draft. What a family's attention is, its subclass says.
"""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.errors import CheckpointError
from engine.kv_spec import KVGroupSpec
from engine.layers.embedding import TokenEmbedding
from engine.layers.expert_router import ExpertRouter
from engine.layers.latent_attention import LatentAttention
from engine.layers.mlp import GatedMLP
from engine.layers.moe import RoutedExperts
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.layers.unnormed import Rows, normed
from engine.models.base import CausalLM
from engine.models.llama import SelfAttention
from engine.models.moe_config import MoEConfig
from engine.models.weights import load_strict

logger = logging.getLogger(__name__)

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class SharedAndRoutedExperts(nn.Module):
    """shared(x) + the chosen experts' weighted sum."""

    def __init__(self, config: MoEConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.router = ExpertRouter(config.routing, hidden_size, dtype=dtype, device=device)
        self.routed = RoutedExperts(
            config.routing.num_experts,
            hidden_size,
            config.expert_size,
            activation="silu",
            dtype=dtype,
            device=device,
        )
        self.shared: GatedMLP | None = None
        if config.shared_size:
            self.shared = GatedMLP(hidden_size, config.shared_size, bias=False, dtype=dtype, device=device)

    def add_to(self, residual: torch.Tensor, x: Rows) -> torch.Tensor:
        """residual + the output, [num_tokens, hidden_size]."""
        x = normed(x)
        expert_ids, weights = self.router(x)
        output: torch.Tensor = self.routed(x, expert_ids, weights)
        return residual + (output if self.shared is None else self.shared.add_to(output, x))

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.router.checkpoint_tensors(f"{prefix}gate.")
        for expert in range(self.routed.num_experts):
            gate, up = self.routed.gate_up[expert].chunk(2)
            yield f"{prefix}experts.{expert}.gate_proj.weight", gate
            yield f"{prefix}experts.{expert}.up_proj.weight", up
            yield f"{prefix}experts.{expert}.down_proj.weight", self.routed.down[expert]
        if self.shared is not None:
            yield from self.shared.checkpoint_tensors(f"{prefix}shared_experts.")


class MoEDecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        attention: SelfAttention | LatentAttention,
        config: MoEConfig,
        *,
        has_experts: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.feed_forward: SharedAndRoutedExperts | GatedMLP
        if has_experts:
            self.feed_forward = SharedAndRoutedExperts(config, dtype, device)
        else:
            size = config.intermediate_size
            self.feed_forward = GatedMLP(hidden_size, size, bias=False, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, rotation: Rotation, context: AttentionContext) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; returns the same shape."""
        return self.after_attention(x, self.attend(x, rotation, context))

    def attend(self, x: torch.Tensor, rotation: Rotation, context: AttentionContext) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns what `after_attention` goes on with."""
        attended: torch.Tensor = self.attention.attend(self.attention_norm(x), rotation, context)
        return attended

    def after_attention(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer. residual: [num_tokens, hidden_size]; returns the same shape."""
        x, normed = self.feed_forward_norm.after(residual, self.attention.output, attended)
        return self.feed_forward.add_to(x, normed)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.attention_norm.checkpoint_tensors(f"{prefix}input_layernorm")
        yield from self.attention.checkpoint_tensors(f"{prefix}self_attn.")
        yield from self.feed_forward_norm.checkpoint_tensors(f"{prefix}post_attention_layernorm")
        yield from self.feed_forward.checkpoint_tensors(f"{prefix}mlp.")


class MoEDecoder(CausalLM):
    """Embedding, layers, norm, head. The hooks below also serve the layer that drafts."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.config = self.read_config(config)
        self.dtype = dtype
        self.device = device
        self.vocab_size = self.config.vocab_size
        self.hidden_size = self.config.hidden_size
        self.max_position_embeddings = self.config.max_position_embeddings
        self.num_layers = self.config.num_layers
        self.embedding = TokenEmbedding(self.vocab_size, self.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(self.config.rope, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            self.make_layer(index, has_experts=index >= self.config.num_dense_layers)
            for index in range(self.num_layers)
        )
        self.norm = self.make_norm()
        self.head = TokenEmbedding(self.vocab_size, self.hidden_size, dtype=dtype, device=device)

    @abstractmethod
    def read_config(self, raw: Mapping[str, Any]) -> MoEConfig:
        """Raises CheckpointError for what this model cannot compute."""

    @abstractmethod
    def make_attention(self, layer_index: int) -> SelfAttention | LatentAttention:
        """Over the cache of this index."""

    @abstractmethod
    def kv_group(self, name: str, num_layers: int) -> KVGroupSpec:
        """Of the layers 0 to `num_layers` - 1 of this kind."""

    def plain_tensors(self, weights: NamedTensors) -> NamedTensors:
        """The checkpoint's tensors in the form in which layers hold them."""
        return weights

    def make_layer(self, layer_index: int, *, has_experts: bool) -> MoEDecoderLayer:
        """A layer with random weights; `layer_index` names its cache."""
        return MoEDecoderLayer(
            self.make_attention(layer_index),
            self.config,
            has_experts=has_experts,
            dtype=self.dtype,
            device=self.device,
        )

    def make_norm(self) -> RMSNorm:
        return RMSNorm(self.hidden_size, self.config.rms_norm_eps, dtype=self.dtype, device=self.device)

    def kv_groups(self) -> list[KVGroupSpec]:
        return [self.kv_group("full", self.num_layers)]

    def embed(self, input_ids: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = self.embedding(input_ids, beside)
        return output

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        rotation = self.rotary(positions)
        needed = attention.needed
        for index, layer in enumerate(cast(Sequence[MoEDecoderLayer], self.layers)):
            attention.observe(index, x)
            attended = layer.attend(x, rotation, attention)
            if needed is not None and index + 1 == self.num_layers:
                # Nobody reads what is made of other tokens behind the last keys and values.
                if not len(needed.tokens):
                    return x
                x, attended = x[needed.tokens], attended[needed.tokens]
            x = layer.after_attention(x, attended)
        output: torch.Tensor = self.norm(x)
        return output if needed is None else needed.spread(output, len(input_ids))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.head.logits(hidden_states)

    def load_weights(self, weights: NamedTensors) -> None:
        plain = self.plain_tensors(self._without_mtp(weights))
        load_strict(type(self).__name__, dict(self._checkpoint_tensors()), plain)

    def _without_mtp(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Leave out the layers that draft; raise CheckpointError for layers that the config does not know."""
        num_layers, num_mtp_layers = self.num_layers, self.config.num_mtp_layers
        num_skipped = 0
        for name, tensor in weights:
            match = _LAYER.match(name)
            layer = 0 if match is None else int(match[1])
            if layer >= num_layers + num_mtp_layers:
                raise CheckpointError(
                    f"{name}: got layer {layer}, expected 0..{num_layers + num_mtp_layers - 1}: num_hidden_layers "
                    f"{num_layers} and num_nextn_predict_layers {num_mtp_layers}"
                )
            if layer < num_layers:
                yield name, tensor
            else:
                num_skipped += 1
        if num_skipped:
            logger.info("left out %d tensors of the MTP layer: draft method 'mtp' reads them", num_skipped)

    def _checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.embedding.checkpoint_tensors("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, MoEDecoderLayer)
            yield from layer.checkpoint_tensors(f"model.layers.{index}.")
        yield from self.norm.checkpoint_tensors("model.norm")
        yield from self.head.checkpoint_tensors("lm_head")
