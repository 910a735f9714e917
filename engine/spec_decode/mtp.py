"""Standard MTP: the layer behind the target's own drafts from its hidden states, with a KV cache of its own."""

from __future__ import annotations

from typing import ClassVar, Self

import torch

from engine.config import SpeculatorConfig
from engine.errors import ConfigError
from engine.models.loader import LoadedModel, load_part
from engine.models.mtp import MTPDraftModel
from engine.spec_decode.options import read_options
from engine.spec_decode.target_head import TargetHeadSpeculator


class MTPSpeculator(TargetHeadSpeculator):
    """The layer stands in the target's checkpoint; what it shares with the target is shared."""

    group_name: ClassVar[str] = "mtp"

    @classmethod
    def load_draft_model(cls, config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> Self:
        read_options(config, {})
        if config.model is not None:
            raise ConfigError(
                f"speculator {config.method}: got model={config.model}, expected none: it is in the target's checkpoint"
            )
        model = MTPDraftModel(target.model)
        load_part(model, target)
        return cls(model, target.model)
