"""Drafters of one tensor: what a layer or two make of the target's hidden states is read by the target's own head, and
fed back. EAGLE-1 and standard MTP; each is a loader.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from engine.attention.backend import AttentionContext
from engine.kv_spec import KVGroupSpec
from engine.models.base import CausalLM
from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from engine.spec_decode.draft_sampling import DraftSampler
from engine.spec_decode.speculator import ProposalInputs, SpeculatorNeeds


class HiddenDraftModel(Protocol):
    """Row p pairs (h_p, x_{p+1}); returns [num_tokens, hidden_size] for the head and as the next h."""

    max_position_embeddings: int

    def kv_group(self, name: str) -> KVGroupSpec: ...

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: AttentionContext,
    ) -> torch.Tensor: ...


class TargetHeadSpeculator(AutoRegressiveSpeculator):
    """Of a model that has no head of its own."""

    needs = SpeculatorNeeds(hidden="all", draft_kv="own", catch_up="hidden")
    group_name: ClassVar[str]  # of its KV

    def __init__(self, model: HiddenDraftModel, target: CausalLM) -> None:
        self._model = model
        self.max_context = model.max_position_embeddings
        self._target = target
        self._sampler = DraftSampler()

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return (self._model.kv_group(self.group_name),)

    def draft_forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: AttentionContext,
    ) -> torch.Tensor:
        return self._model(input_ids, positions, hidden_states, attention)

    def sample_draft(
        self, hidden: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor
    ) -> torch.Tensor:
        return self._sampler.draw(self._target.compute_logits(hidden), inputs, positions)
