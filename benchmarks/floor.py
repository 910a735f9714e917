"""What a decode step costs at least: the weights that it must read, at the memory's measured bandwidth, or its products
at the measured rate, whichever is longer; and of each layer the eight launches that a Llama layer takes. Attention,
activations, and the launches around the layers are left out.

python -m benchmarks.floor [--geometry llama-3.1-8b] [--speculator eagle3] [--k 4] [--batch 1 8 64]
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
from torch import nn

from benchmarks.geometries import DRAFTERS, GEOMETRIES
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts
from engine.models.base import CausalLM
from engine.models.eagle3 import Eagle3DraftModel
from engine.models.gemma4_assistant import Gemma4AssistantModel
from engine.models.mtp import MTPDraftModel
from engine.models.registry import MODELS

BANDWIDTH = 4.255e12  # bytes a second, one H200: a copy of 4 GiB, read and written
PRODUCT_RATE = 767e12  # operations a second, one H200: a bfloat16 product of 8192 x 8192 matrices
LAUNCH_SECONDS = 1.03e-6  # of a short kernel in a graph, one H200
LAUNCHES_OF_LAYER = 8
DTYPE, META = torch.bfloat16, torch.device("meta")


def floor_ms(geometry: str, batch: int, speculator: str = "none", num_drafts: int = 0) -> float:
    """Of one step: verification of 1 + num_drafts tokens a request, and as many drafts."""
    target = _target(geometry)
    config = GEOMETRIES[geometry]
    num_chosen = config.get("num_experts_per_tok", config.get("top_k_experts", 1))
    head = _head_weights(target)
    seconds = _pass_seconds(target, head, batch * (1 + num_drafts), num_chosen)
    if speculator not in ("none", "ngram"):
        drafter = _drafter(target, speculator, DRAFTERS[geometry, speculator])
        own_head = _head_weights(drafter) or head  # without one, it reads the target's
        seconds += num_drafts * _pass_seconds(drafter, own_head, batch, num_chosen)
    return seconds * 1e3


@functools.cache
def _target(geometry: str) -> CausalLM:
    config = GEOMETRIES[geometry]
    return MODELS.get(config["architectures"][0])(config, DTYPE, META)


def _drafter(target: CausalLM, speculator: str, config: dict[str, Any] | None) -> nn.Module:
    if speculator == "mtp":
        return MTPDraftModel(target)
    assert config is not None
    if speculator == "eagle3":
        return Eagle3DraftModel(config, target, DTYPE, META)
    return Gemma4AssistantModel(config, target, DTYPE, META)


def _head_weights(model: nn.Module) -> int:
    """0 for a model without a head, and for a sparse one, which reads little of it."""
    head = getattr(model, "head", getattr(model, "embedding", None))
    is_sparse = getattr(model, "centroid_head", None) is not None
    return head.weight.numel() if isinstance(head, TokenEmbedding) and not is_sparse else 0


def _pass_seconds(model: nn.Module, head: int, num_rows: int, num_chosen: int) -> float:
    dense = head + sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    experts = sum(
        (module.gate_up.numel() + module.down.numel())
        * (1.0 - (1.0 - num_chosen / module.num_experts) ** num_rows)
        for module in model.modules()
        if isinstance(module, RoutedExperts)  # those that random routing would choose for at least one row
    )
    num_bytes = (dense + experts) * DTYPE.itemsize
    launching = _num_layers(model) * LAUNCHES_OF_LAYER * LAUNCH_SECONDS
    return max(num_bytes / BANDWIDTH, 2.0 * dense * num_rows / PRODUCT_RATE) + launching


def _num_layers(model: nn.Module) -> int:
    """A model that drafts may have but one, and no list of it."""
    layers = getattr(model, "layers", None)
    return len(layers) if isinstance(layers, nn.ModuleList) else 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES))
    parser.add_argument("--speculator", default="none")
    parser.add_argument("--k", type=int, default=0)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64, 256])
    arguments = parser.parse_args()
    for geometry in arguments.geometry:
        floors = [floor_ms(geometry, batch, arguments.speculator, arguments.k) for batch in arguments.batch]
        print(
            geometry,
            ", ".join(f"{batch}: {ms:.2f} ms" for batch, ms in zip(arguments.batch, floors, strict=True)),
        )


if __name__ == "__main__":
    main()
