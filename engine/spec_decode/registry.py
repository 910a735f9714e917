"""Which class drafts under which name: one line a method. The line also enrols it in the equivalence tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.config import SpeculatorConfig
from engine.errors import ConfigError
from engine.models.loader import LoadedModel
from engine.registry import Registry
from engine.spec_decode.eagle import Eagle3Speculator, EagleSpeculator
from engine.spec_decode.gemma4 import Gemma4Speculator
from engine.spec_decode.host import HostSpeculator
from engine.spec_decode.independent import IndependentDraftSpeculator
from engine.spec_decode.mtp import MTPSpeculator
from engine.spec_decode.ngram import NgramSpeculator
from engine.spec_decode.options import read_options
from engine.spec_decode.speculator import BaseSpeculator
from engine.spec_decode.suffix import SuffixSpeculator

Speculator = BaseSpeculator | HostSpeculator
SpeculatorFactory = Callable[[SpeculatorConfig, LoadedModel, torch.device], Speculator]


def init_speculator(config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> Speculator:
    """Build the draft method that a configuration names. Raises ConfigError or CheckpointError."""
    return SPECULATORS.get(config.method)(config, target, device)


def _make_ngram(config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> BaseSpeculator:
    options = read_options(config, {"min_n": 2, "max_n": 4})
    if not 1 <= options["min_n"] <= options["max_n"]:
        raise ConfigError(
            f"speculator ngram: got min_n {options['min_n']} and max_n {options['max_n']}, expected 1 <= min_n <= max_n"
        )
    return NgramSpeculator(options["min_n"], options["max_n"])


def _make_suffix(config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> HostSpeculator:
    options = read_options(
        config, {"min_match": 2, "max_match": 24, "min_percent": 10, "max_past_tokens": 100_000}
    )
    if not 1 <= options["min_match"] <= options["max_match"]:
        raise ConfigError(
            f"speculator suffix: got min_match {options['min_match']} and max_match {options['max_match']}, "
            f"expected 1 <= min_match <= max_match"
        )
    if options["min_percent"] > 100:
        raise ConfigError(f"speculator suffix: got min_percent {options['min_percent']}, expected 0..100")
    return SuffixSpeculator(
        options["min_match"], options["max_match"], options["min_percent"] / 100, options["max_past_tokens"]
    )


SPECULATORS: Registry[SpeculatorFactory] = Registry(
    "speculator",
    {
        "ngram": _make_ngram,
        "suffix": _make_suffix,
        "draft_model": IndependentDraftSpeculator.load_draft_model,
        "eagle": EagleSpeculator.load_draft_model,
        "eagle3": Eagle3Speculator.load_draft_model,
        "mtp": MTPSpeculator.load_draft_model,
        "gemma4_mtp": Gemma4Speculator.load_draft_model,
    },
)
