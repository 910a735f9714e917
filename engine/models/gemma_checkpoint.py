"""The spellings of Gemma checkpoints: multimodal prefixes, towers, dead tensors, experts one by one.

Renames and drops only; what is left must fit the model exactly (engine/models/weights.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator

import torch

from engine.errors import CheckpointError
from engine.models.gemma_config import GemmaConfig

logger = logging.getLogger(__name__)

# The decoder's prefix in multimodal checkpoints, of today and of the first Gemma 3 releases -> in text-only ones.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_OTHER_MODALITIES = re.compile(
    r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder|multi_modal_projector)\."
)
_SHARED_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.weight")
_EXPERT = re.compile(r"(model\.layers\.\d+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def gemma_tensors(
    weights: Iterable[tuple[str, torch.Tensor]], config: GemmaConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """The decoder's tensors under the names of a text-only checkpoint.

    Raises CheckpointError when experts that are stored one by one are incomplete.
    """
    num_skipped = 0
    experts = _ExpertStacks(config)
    for name, tensor in weights:
        if _OTHER_MODALITIES.match(name):
            num_skipped += 1
            continue
        name = _text_only_name(name)
        shared = _SHARED_KV.fullmatch(name)
        if shared is not None and _is_dead(config, int(shared[1])):
            continue
        part = _EXPERT.fullmatch(name)
        if part is None:
            yield name, tensor
        else:
            yield from experts.add(part[1], int(part[2]), part[3], tensor)
    experts.check_complete()
    if num_skipped:
        logger.info("skipped %d tensors of other modalities: this is the text decoder", num_skipped)


def _text_only_name(name: str) -> str:
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
            break
    return name.replace(".moe.", ".experts.")  # as some early checkpoints say


def _is_dead(config: GemmaConfig, layer: int) -> bool:
    """Converters write K and V of layers that read another layer's cache; nobody uses them."""
    return layer < len(config.layers) and config.layers[layer].kv_source != layer


class _ExpertStacks:
    """Collects a layer's experts until they can be stacked: gate rows before up rows."""

    def __init__(self, config: GemmaConfig) -> None:
        self._num_experts = 0 if config.experts is None else config.experts.num_experts
        self._parts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}

    def add(
        self, prefix: str, expert: int, kind: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields both stacks once the last part of a layer has come."""
        parts = self._parts.setdefault(prefix, {})
        parts[expert, kind] = tensor
        if len(parts) < 3 * self._num_experts or not self._num_experts:
            return
        del self._parts[prefix]
        if missing := self._missing(parts):
            raise CheckpointError(
                f"{prefix}: got no {missing[0]}, expected experts 0..{self._num_experts - 1}"
            )
        experts = range(self._num_experts)
        gate_up = [torch.cat((parts[i, "gate_proj"], parts[i, "up_proj"])) for i in experts]
        yield f"{prefix}.gate_up_proj", torch.stack(gate_up)
        yield f"{prefix}.down_proj", torch.stack([parts[i, "down_proj"] for i in experts])

    def check_complete(self) -> None:
        """Raise CheckpointError naming what lacks of the first layer that is incomplete."""
        for prefix, parts in self._parts.items():
            if not self._num_experts:
                raise CheckpointError(f"{prefix}: got experts, expected none: the config has no experts")
            raise CheckpointError(f"{prefix}: incomplete; missing: {', '.join(self._missing(parts))}")

    def _missing(self, parts: dict[tuple[int, str], torch.Tensor]) -> list[str]:
        return [
            f"{expert}.{kind}"
            for expert in range(self._num_experts)
            for kind in ("gate_proj", "up_proj", "down_proj")
            if (expert, kind) not in parts
        ]
