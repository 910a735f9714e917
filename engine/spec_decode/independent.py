"""An independent draft model: any registered model with the target's vocabulary, decoding k steps by itself.

Leviathan et al. 2022 (arXiv:2211.17192); verification is ours (engine/kernels/emit_runs.py).
"""

from __future__ import annotations

from typing import Self

import msgspec
import torch

from engine.attention.backend import AttentionContext
from engine.config import ModelConfig, SpeculatorConfig
from engine.errors import ConfigError
from engine.kv_spec import KVGroupSpec
from engine.models.base import CausalLM
from engine.models.loader import LoadedModel, load_model
from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from engine.spec_decode.draft_sampling import DraftSampler
from engine.spec_decode.options import checkpoint_of, read_options
from engine.spec_decode.speculator import ProposalInputs, SpeculatorNeeds


class IndependentDraftSpeculator(AutoRegressiveSpeculator):
    """The draft prefill only fills the cache; every draft costs one step of the loop."""

    needs = SpeculatorNeeds(draft_kv="own", catch_up="tokens", first_draft_from_prefill=False)

    @classmethod
    def load_draft_model(cls, config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> Self:
        read_options(config, {})
        dtype = str(target.dtype).removeprefix("torch.")
        values = {"model": checkpoint_of(config), "dtype": dtype}
        draft = load_model(ModelConfig.model_validate(values), device=device)
        if draft.model.vocab_size != target.model.vocab_size:
            raise ConfigError(
                f"speculator {config.method}: got a vocabulary of {draft.model.vocab_size} tokens, expected "
                f"{target.model.vocab_size}, the target model's"
            )
        return cls(draft.model)

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.max_context = model.max_position_embeddings
        self._sampler = DraftSampler()

    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """The model's own, under names that the target's groups do not have."""
        return tuple(
            msgspec.structs.replace(group, name=f"draft_model.{group.name}")
            for group in self._model.kv_groups()
        )

    def draft_forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: AttentionContext,
    ) -> torch.Tensor:
        output: torch.Tensor = self._model(input_ids, positions, attention)
        return output

    def sample_draft(
        self, hidden: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor
    ) -> torch.Tensor:
        return self._sampler.draw(self._model.compute_logits(hidden), inputs, positions)
