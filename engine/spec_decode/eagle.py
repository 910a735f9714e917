"""EAGLE and EAGLE-3: heads that draft from the target's hidden states, with a KV cache of their own."""

from __future__ import annotations

from typing import ClassVar, Self

import torch

from engine.attention.backend import AttentionContext
from engine.config import SpeculatorConfig
from engine.kv_spec import KVGroupSpec
from engine.models.base import CausalLM
from engine.models.eagle import EagleDraftModel
from engine.models.eagle3 import Eagle3DraftModel
from engine.models.loader import LoadedModel, load_drafter
from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from engine.spec_decode.draft_sampling import DraftSampler
from engine.spec_decode.options import open_drafter, read_options
from engine.spec_decode.speculator import ProposalInputs, SpeculatorNeeds
from engine.spec_decode.target_head import TargetHeadSpeculator


class EagleSpeculator(TargetHeadSpeculator):
    """EAGLE-1: the target's head reads the layer's output, which is also what is fed back."""

    group_name: ClassVar[str] = "eagle"

    @classmethod
    def load_draft_model(cls, config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> Self:
        read_options(config, {})
        source = open_drafter(config, target)
        model = EagleDraftModel(source.config(), target.model, target.dtype, device)
        load_drafter(model, source, target)
        return cls(model, target.model)


class Eagle3Speculator(AutoRegressiveSpeculator):
    """EAGLE-3: fused inputs of several target layers, a head over a draft vocabulary."""

    @classmethod
    def load_draft_model(cls, config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> Self:
        read_options(config, {})
        source = open_drafter(config, target)
        model = Eagle3DraftModel(source.config(), target.model, target.dtype, device)
        load_drafter(model, source, target)
        return cls(model, target.model)

    def __init__(self, model: Eagle3DraftModel, target: CausalLM) -> None:
        self.needs = SpeculatorNeeds(
            hidden="all", aux_layers=model.aux_layers, draft_kv="own", catch_up="hidden"
        )
        self._model = model
        self.max_context = model.config.max_position_embeddings
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
        logits, token_ids = self._model.compute_logits(hidden)
        return self._sampler.draw_among(logits, token_ids, inputs, positions)
