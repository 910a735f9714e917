"""What draft methods read of their configuration: whole-number options, and the drafter's checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from engine.checkpoint.open import open_checkpoint
from engine.checkpoint.source import CheckpointSource
from engine.config import ModelConfig, SpeculatorConfig
from engine.errors import ConfigError
from engine.models.loader import LoadedModel


def open_drafter(config: SpeculatorConfig, target: LoadedModel) -> CheckpointSource:
    """The drafter's checkpoint. A target with random weights has drafters with random weights."""
    load_format: Literal["auto", "dummy"] = "auto" if target.source is not None else "dummy"
    return open_checkpoint(ModelConfig(model=checkpoint_of(config), load_format=load_format))


def checkpoint_of(config: SpeculatorConfig) -> str:
    if config.model is None:
        raise ConfigError(f"speculator {config.method}: got no model, expected model=PATH or a hub id")
    return config.model


def read_options(config: SpeculatorConfig, defaults: dict[str, int]) -> dict[str, int]:
    """The whole-number options of a method. Raises ConfigError for unknown names and other values."""
    refuse_options(config, [name for name in config.options if name not in defaults], tuple(defaults))
    values = dict(defaults)
    for name, text in config.options.items():
        if not text.isdecimal():
            raise ConfigError(f"speculator {config.method}: got {name}={text!r}, expected a whole number")
        values[name] = int(text)
    return values


def refuse_options(config: SpeculatorConfig, unknown: Iterable[str], known: Sequence[str]) -> None:
    for name in unknown:
        expected = ", ".join(known) or "none"
        raise ConfigError(f"speculator {config.method}: got option {name!r}, expected one of: {expected}")
