"""A target model without weights whose logits are a pure function of the token history, read back from the KV cache.

Each token stores small integers made of its id and position as V; uniform attention (zero queries and keys) returns
their mean, and mean times length is their exact sum. So a stale, missing, misplaced or foreign KV entry changes the
logits at once: the model tests the cache as much as the loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.attention.backend import AttentionContext
from engine.kv_spec import KVGroupSpec
from engine.models.base import CausalLM

NUM_FEATURES = 4
FEATURE_RANGE = 2**16
_TOKEN_FACTORS = (40503, 30011, 52361, 24593)
_POSITION_FACTORS = (9176, 61981, 17389, 45007)


class ScriptedTarget(CausalLM):
    """Logits in [0, 8), float64. `nan_token`: a history that ends with this token gives NaN logits."""

    def __init__(
        self, vocab_size: int = 64, max_position_embeddings: int = 512, nan_token: int | None = None
    ) -> None:
        torch.nn.Module.__init__(self)
        self.vocab_size = vocab_size
        self.hidden_size = NUM_FEATURES
        self.max_position_embeddings = max_position_embeddings
        self.num_layers = 1
        self._nan_token = nan_token

    def kv_groups(self) -> list[KVGroupSpec]:
        spec = KVGroupSpec(
            name="full",
            layer_indices=(0,),
            num_kv_heads=1,
            head_size=NUM_FEATURES,
            bytes_per_token=2 * NUM_FEATURES * 8,
        )
        return [spec]

    def embed(self, input_ids: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("no drafter shares an embedding with the scripted target")

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Returns [num_tokens, NUM_FEATURES]: the feature sums over each token's history."""
        assert bool(((input_ids >= 0) & (input_ids < self.vocab_size)).all()), (
            "an input id is outside the vocabulary"
        )
        token_factors = torch.tensor(_TOKEN_FACTORS)
        position_factors = torch.tensor(_POSITION_FACTORS)
        features = (
            (input_ids[:, None] + 1) * token_factors + (positions[:, None] + 1) * position_factors
        ) % FEATURE_RANGE
        value = features.to(torch.float64)[:, None, :]
        zeros = torch.zeros_like(value)
        mean = attention.attend(0, zeros, zeros, value, 1.0).reshape(-1, NUM_FEATURES)
        sums = torch.round(mean * (positions[:, None] + 1))
        if self._nan_token is not None:
            sums[input_ids == self._nan_token] = float("nan")
        return sums

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        bad = hidden_states.isnan().any(dim=1)
        sums = hidden_states.nan_to_num(0.0).to(torch.int64)
        mixed = (sums * torch.tensor([1000003, 998244353, 1000000007, 1299709])).sum(dim=1)
        token_ids = torch.arange(self.vocab_size)
        noise = _mix(mixed[:, None] * 2654435761 + token_ids * 40499)
        logits = noise.to(torch.float64) * (8.0 / 2**31)
        logits[bad] = float("nan")
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError("there are no weights")


def _mix(values: torch.Tensor) -> torch.Tensor:
    """A 31-bit hash of int64 values (wrapping multiplication)."""
    for factor in (-7046029254386353131, -4417276706812531889):
        values = (values ^ ((values >> 29) & 0x7FFFFFFFF)) * factor
    return (values >> 32) & 0x7FFFFFFF


def reference_continuation(target: ScriptedTarget, prompt: list[int], num_tokens: int, **_: Any) -> list[int]:
    """Greedy continuation by the definition, without engine or cache."""
    history = list(prompt)
    for _index in range(num_tokens):
        ids = torch.tensor(history)
        positions = torch.arange(len(history))
        features = (
            (ids[:, None] + 1) * torch.tensor(_TOKEN_FACTORS)
            + (positions[:, None] + 1) * torch.tensor(_POSITION_FACTORS)
        ) % FEATURE_RANGE
        logits = target.compute_logits(features.sum(dim=0, keepdim=True).to(torch.float64))
        history.append(int(logits[0].argmax()))
    return history[len(prompt) :]
