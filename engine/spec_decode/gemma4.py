"""Gemma 4 MTP: the assistant drafts over the target's KV cache, one row per request, at a constant position.

A round starts from the target's hidden state h_t of the last position t whose KV is valid, and from the token behind
it. Every draft step sees the keys 0..t; drafts add none. So there is nothing to catch up with after steps without
drafts, and a rejected draft leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import msgspec
import torch

from engine.attention.backend import AttentionContext
from engine.config import SpeculatorConfig
from engine.errors import ConfigError
from engine.layers.rotary import Rotation
from engine.models.gemma4_assistant import Gemma4AssistantModel
from engine.models.loader import LoadedModel, load_drafter
from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from engine.spec_decode.draft_sampling import DraftSampler
from engine.spec_decode.options import open_drafter, refuse_options
from engine.spec_decode.speculator import DraftContext, ProposalInputs, SpeculatorNeeds


@dataclass(frozen=True)
class DraftPositionPolicy:
    """Where a draft step stands. Implementations differ; texts do not depend on it, acceptance may."""

    rope_offset: int  # the query's rotary position, relative to t
    extra_window_keys: int  # keys that a sliding layer's query sees beyond the target's window


POSITION_POLICIES = {
    "last_key": DraftPositionPolicy(rope_offset=0, extra_window_keys=0),
    "last_token": DraftPositionPolicy(rope_offset=1, extra_window_keys=1),
}
DEFAULT_POSITION_POLICY = "last_key"  # what a paged cache keeps alive without holding a block for longer


class Gemma4Speculator(AutoRegressiveSpeculator):
    """Drafts from (the target's scaled embedding, hidden state); what is fed back is as wide as the target."""

    @classmethod
    def load_draft_model(cls, config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> Self:
        options = dict(config.options)
        policy = options.pop("positions", DEFAULT_POSITION_POLICY)
        refuse_options(config, options, ("positions",))
        if policy not in POSITION_POLICIES:
            raise ConfigError(
                f"speculator {config.method}: got positions={policy!r}, expected one of {', '.join(POSITION_POLICIES)}"
            )
        source = open_drafter(config, target)
        model = Gemma4AssistantModel(source.config(), target.model, target.dtype, device)
        load_drafter(model, source, target)
        return cls(model, POSITION_POLICIES[policy])

    def __init__(self, model: Gemma4AssistantModel, policy: DraftPositionPolicy) -> None:
        self.needs = SpeculatorNeeds(
            hidden="last", draft_kv="target", extra_window_keys=policy.extra_window_keys
        )
        self._model = model
        self._policy = policy
        self._sampler = DraftSampler()
        self._place: tuple[AttentionContext, Mapping[str, Rotation]] | None = None  # of a round of drafts
        self.max_context = model.config.max_position_embeddings

    @property
    def advance_draft_positions(self) -> bool:
        return False

    def bind(self, context: DraftContext) -> None:
        groups = [
            group
            if group.window is None
            else msgspec.structs.replace(group, window=group.window + self._policy.extra_window_keys)
            for group in context.groups
        ]
        super().bind(replace(context, groups=groups))

    def draft_forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: AttentionContext,
    ) -> torch.Tensor:
        rotations = self._rotations(positions, attention)
        output: torch.Tensor = self._model(input_ids, hidden_states, rotations, attention)
        return output

    def _rotations(self, positions: torch.Tensor, attention: AttentionContext) -> Mapping[str, Rotation]:
        """Made once for all draft steps of a round: they stand at one place."""
        if self._place is None or self._place[0] is not attention:
            offset = self._policy.rope_offset
            self._place = attention, self._model.rotations(positions + offset if offset else positions)
        return self._place[1]

    def after_draft_decode(self, drafts: torch.Tensor) -> None:
        self._place = None  # of a captured round, its memory is the graph's

    def feed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.feed_back(hidden)

    def sample_draft(
        self, hidden: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor
    ) -> torch.Tensor:
        sparse_head = self._model.centroid_head
        if sparse_head is None:
            return self._sampler.draw(self._model.head.logits(hidden), inputs, positions)
        if self._sampler.takes_largest(inputs):
            return sparse_head.first_tokens(hidden)
        logits, token_ids = sparse_head(hidden)
        return self._sampler.draw_among(logits, token_ids, inputs, positions)
