"""Rotary position embedding (arXiv:2104.09864), half-split form: feature i turns with i + size / 2.

Frequencies, angles, cosines and sines are float32 whatever the model's dtype, as in the reference
implementations: rounding them (or making them more exact) changes the text of long contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from engine.errors import CheckpointError
from engine.kernels.rotary_tables import rotary_tables
from engine.registry import Registry

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines, sines: [num_tokens, 1, head_size / 2] each


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """`scaling` holds what the type needs: factor, low_freq_factor, beta_fast, ..."""

    rope_type: str
    theta: float
    head_size: int
    max_position_embeddings: int
    scaling: Mapping[str, float]

    def required(self, key: str) -> float:
        if key not in self.scaling:
            raise CheckpointError(
                f"rope_parameters.{key}: missing, expected a number for type {self.rope_type}"
            )
        return self.scaling[key]


class RotaryEmbedding(nn.Module):
    """Gives the turns of a step's tokens once; every layer applies them with `rotate` of engine/kernels/rotary.py."""

    inverse_frequencies: torch.Tensor  # [head_size / 2] float32

    def __init__(self, config: RopeConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        frequencies, self._magnitude = ROPE_TYPES.get(config.rope_type)(config)
        self.register_buffer("inverse_frequencies", frequencies.to(device), persistent=False)
        self._dtype = dtype

    def forward(self, positions: torch.Tensor) -> Rotation:
        """[num_tokens] int64 -> cosines and sines for `rotate`."""
        return rotary_tables(positions, self.inverse_frequencies, self._magnitude, self._dtype)


# ---- frequencies by rope type: RopeConfig -> ([head_size / 2] float32, factor of cosines and sines) --------


def _default_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """theta^(-2i / head_size)."""
    return 1.0 / (config.theta ** _exponents(config)), 1.0


def _exponents(config: RopeConfig) -> torch.Tensor:
    """2i / head_size: [head_size / 2] float32."""
    return torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size


def _linear_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Positions divided by `factor` (position interpolation, arXiv:2306.15595)."""
    frequencies, magnitude = _default_frequencies(config)
    return frequencies / config.required("factor"), magnitude


def _proportional_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Gemma 4: the first `partial_rotary_factor` of the features turn as in the default type, over the whole head's
    exponents; the others do not turn at all. Example, head_size 512, factor 0.25: features 0..63, with 256..319.
    """
    frequencies, magnitude = _default_frequencies(config)
    num_turning = int(config.required("partial_rotary_factor") * config.head_size // 2)
    frequencies[num_turning:] = 0.0
    return frequencies / config.scaling.get("factor", 1.0), magnitude


def _llama3_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    frequencies, magnitude = _default_frequencies(config)
    factor, low, high = (config.required(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original_length = config.required("original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    smooth = (original_length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original_length / low, frequencies / factor, blended)
    return torch.where(wavelengths < original_length / high, frequencies, scaled), magnitude


def _yarn_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv:2309.00071): a ramp over the features from kept to divided by `factor`."""
    original_length = config.required("original_max_position_embeddings")
    factor = config.scaling.get("factor", config.max_position_embeddings / original_length)
    wavelengths = config.theta ** _exponents(config)  # divided by 2 pi

    def feature_of(num_rotations: float) -> float:
        """The feature pair that turns `num_rotations` times within the original length."""
        angle = original_length / (num_rotations * 2 * math.pi)
        return (config.head_size * math.log(angle)) / (2 * math.log(config.theta))

    low = feature_of(config.scaling.get("beta_fast", 32.0))
    high = feature_of(config.scaling.get("beta_slow", 1.0))
    if config.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_size - 1)
    ramp = (torch.arange(len(wavelengths), dtype=torch.float32) - low) / (
        high - low if high != low else 0.001
    )
    kept_share = 1 - ramp.clamp(0, 1)
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept_share) + 1.0 / wavelengths * kept_share
    return frequencies, config.scaling.get("attention_factor", _yarn_magnitude(config, factor))


def _yarn_magnitude(config: RopeConfig, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all_dim = config.scaling.get("mscale"), config.scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


ROPE_TYPES: Registry[Callable[[RopeConfig], tuple[torch.Tensor, float]]] = Registry(
    "rope_parameters.rope_type",
    {
        "default": _default_frequencies,
        "linear": _linear_frequencies,
        "proportional": _proportional_frequencies,
        "llama3": _llama3_frequencies,
        "yarn": _yarn_frequencies,
    },
    error=CheckpointError,
)
