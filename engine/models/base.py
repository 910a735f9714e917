"""What every target model offers the worker. A model knows layers and tensor names, nothing of requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.kv_spec import KVGroupSpec


class CausalLM(nn.Module, ABC):
    """A decoder. Built on the meta device or the target device from the checkpoint's raw config (a dict)."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    num_layers: int

    architectures: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None: ...

    @abstractmethod
    def kv_groups(self) -> list[KVGroupSpec]:
        """KV groups by index; every layer with a cache of its own is in exactly one."""

    def shareable_kv(self) -> Mapping[str, int]:
        """By layer type, the layer whose K and V a drafter without a cache of its own reads; empty: none may."""
        return {}

    @abstractmethod
    def embed(self, input_ids: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        """[num_tokens] int64 -> what enters the first layer, [num_tokens, hidden_size]; drafters share it, and have
        rows of their own, [num_tokens, width], put behind it: [num_tokens, hidden_size + width]."""

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """input_ids, positions: [num_tokens] int64. Returns [num_tokens, hidden_size], normed; rows of tokens that are
        not needed (AttentionContext.needed) may hold anything.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size], of the model's dtype or float32. Who computes with half types
        converts them first: float32 holds them exactly."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take every tensor of the checkpoint by its checkpoint name.

        Raises CheckpointError naming all unknown, missing and misshapen tensors.
        """
