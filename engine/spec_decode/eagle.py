"""EAGLE and EAGLE-3: heads that draft from the target's hidden states, with a KV cache of their own."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionContext
from engine.kv_spec import KVGroupSpec
from engine.models.base import CausalLM
from engine.models.eagle import EagleDraftModel
from engine.models.eagle3 import Eagle3DraftModel
from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from engine.spec_decode.draft_sampling import DraftSampler
from engine.spec_decode.speculator import ProposalInputs, SpeculatorNeeds


class EagleSpeculator(AutoRegressiveSpeculator):
    """EAGLE-1: the target's head reads the layer's output, which is also what is fed back."""

    needs = SpeculatorNeeds(hidden="all", draft_kv="own", catch_up="hidden")

    def __init__(self, model: EagleDraftModel, target: CausalLM) -> None:
        self._model = model
        self.max_context = model.config.max_position_embeddings
        self._target = target
        self._sampler = DraftSampler()

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return (self._model.kv_group("eagle"),)

    def draft_forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: AttentionContext,
    ) -> torch.Tensor:
        output: torch.Tensor = self._model(input_ids, positions, hidden_states, attention)
        return output

    def sample_draft(
        self, hidden: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor
    ) -> torch.Tensor:
        return self._sampler.draw(self._target.compute_logits(hidden), inputs, positions)


class Eagle3Speculator(AutoRegressiveSpeculator):
    """EAGLE-3: fused inputs of several target layers, a head over a draft vocabulary."""

    def __init__(self, model: Eagle3DraftModel, target: CausalLM) -> None:
        self.needs = SpeculatorNeeds(
            hidden="all", aux_layers=model.aux_layers, draft_kv="own", catch_up="hidden"
        )
        self._model = model
        self.max_context = model.config.max_position_embeddings
        self._vocab_size = target.vocab_size
        self._sampler = DraftSampler()

    @property
    def model_returns_tuple(self) -> bool:
        return True

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return (self._model.kv_group("eagle3"),)

    def prefill_hidden(self, inputs: ProposalInputs) -> torch.Tensor:
        return self._model.combine([inputs.aux_hidden_states[layer] for layer in self._model.aux_layers])

    def draft_forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for_logits, feedback = self._model(input_ids, positions, hidden_states, attention)
        return for_logits, feedback

    def sample_draft(
        self, hidden: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor
    ) -> torch.Tensor:
        return self._sampler.draw(self._model.compute_logits(hidden, self._vocab_size), inputs, positions)
