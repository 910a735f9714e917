"""Which numerics an engine runs with: what the configuration asks for, as far as device and model allow it."""

from __future__ import annotations

from typing import Literal

import torch

from engine.attention.registry import make_attention_backend
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.exact import inexact_layers, make_exact
from engine.models.loader import LoadedModel


def set_numerics(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> Literal["exact", "fast"]:
    """Switch the target over if numerics are to be exact; what they are. Raises ConfigError where they cannot be."""
    if config.numerics == "fast":
        return "fast"
    obstacle = _obstacle(config, loaded, device)
    if obstacle is None:
        make_exact(loaded.model)
        loaded.model.compute_logits(
            torch.zeros(1, loaded.model.hidden_size, dtype=loaded.dtype, device=device)
        )
        torch.cuda.empty_cache()  # what the trials used, before the KV cache takes its share
        return "exact"
    if config.numerics == "exact":
        raise ConfigError(f"numerics: got 'exact' {obstacle}")
    return "fast"


def _obstacle(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> str | None:
    """What stands in the way of exact numerics."""
    if device.type != "cuda":
        return f"on {device}, expected a CUDA device"
    if loaded.dtype not in (torch.bfloat16, torch.float16):
        return f"with {loaded.dtype}, expected bfloat16 or float16"
    if not make_attention_backend(config.attention_backend, device).is_exact:
        return (
            f"with the attention backend {config.attention_backend!r}, expected one whose sums have one order"
        )
    if layers := inexact_layers(loaded.model):
        return f"for {loaded.architecture}, expected a model without {' and '.join(layers)}"
    return None
