"""Which class drafts under which name: one line a method. The line also enrols it in the equivalence tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from engine.checkpoint.open import open_checkpoint
from engine.config import ModelConfig, SpeculatorConfig
from engine.errors import ConfigError
from engine.models.eagle import EagleDraftModel
from engine.models.eagle3 import Eagle3DraftModel
from engine.models.gemma4_assistant import Gemma4AssistantModel
from engine.models.loader import LoadedModel, load_model
from engine.registry import Registry
from engine.spec_decode.eagle import Eagle3Speculator, EagleSpeculator
from engine.spec_decode.gemma4 import DEFAULT_POSITION_POLICY, POSITION_POLICIES, Gemma4Speculator
from engine.spec_decode.host import HostSpeculator
from engine.spec_decode.independent import IndependentDraftSpeculator
from engine.spec_decode.ngram import NgramSpeculator
from engine.spec_decode.speculator import BaseSpeculator
from engine.spec_decode.suffix import SuffixSpeculator

Speculator = BaseSpeculator | HostSpeculator
SpeculatorFactory = Callable[[SpeculatorConfig, LoadedModel, torch.device], Speculator]


def init_speculator(config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> Speculator:
    """Build the draft method that a configuration names. Raises ConfigError or CheckpointError."""
    return SPECULATORS.get(config.method)(config, target, device)


def _make_ngram(config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> BaseSpeculator:
    options = _read_options(config, {"min_n": 2, "max_n": 4})
    if not 1 <= options["min_n"] <= options["max_n"]:
        raise ConfigError(
            f"speculator ngram: got min_n {options['min_n']} and max_n {options['max_n']}, expected 1 <= min_n <= max_n"
        )
    return NgramSpeculator(options["min_n"], options["max_n"])


def _make_suffix(config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> HostSpeculator:
    options = _read_options(
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


def _make_draft_model(config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> BaseSpeculator:
    _read_options(config, {})
    dtype = str(target.dtype).removeprefix("torch.")
    draft = load_model(
        ModelConfig.model_validate({"model": _checkpoint(config), "dtype": dtype}), device=device
    )
    if draft.model.vocab_size != target.model.vocab_size:
        raise ConfigError(
            f"speculator draft_model: got a vocabulary of {draft.model.vocab_size} tokens, expected "
            f"{target.model.vocab_size}, the target model's"
        )
    return IndependentDraftSpeculator(draft.model)


def _make_eagle(config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> BaseSpeculator:
    _read_options(config, {})
    source = open_checkpoint(ModelConfig(model=_checkpoint(config)))
    model = EagleDraftModel(source.config(), target.model, target.dtype, device)
    model.load_weights(source.tensors())
    return EagleSpeculator(model, target.model)


def _make_eagle3(config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> BaseSpeculator:
    _read_options(config, {})
    source = open_checkpoint(ModelConfig(model=_checkpoint(config)))
    model = Eagle3DraftModel(source.config(), target.model, target.dtype, device)
    model.load_weights(source.tensors())
    return Eagle3Speculator(model, target.model)


def _make_gemma4(config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> BaseSpeculator:
    options = dict(config.options)
    policy = options.pop("positions", DEFAULT_POSITION_POLICY)
    _refuse_options(config, options, ("positions",))
    if policy not in POSITION_POLICIES:
        raise ConfigError(
            f"speculator {config.method}: got positions={policy!r}, expected one of {', '.join(POSITION_POLICIES)}"
        )
    source = open_checkpoint(ModelConfig(model=_checkpoint(config)))
    model = Gemma4AssistantModel(source.config(), target.model, target.dtype, device)
    model.load_weights(source.tensors())
    return Gemma4Speculator(model, POSITION_POLICIES[policy])


SPECULATORS: Registry[SpeculatorFactory] = Registry(
    "speculator",
    {
        "ngram": _make_ngram,
        "suffix": _make_suffix,
        "draft_model": _make_draft_model,
        "eagle": _make_eagle,
        "eagle3": _make_eagle3,
        "gemma4_mtp": _make_gemma4,
    },
)


def _checkpoint(config: SpeculatorConfig) -> str:
    if config.model is None:
        raise ConfigError(f"speculator {config.method}: got no model, expected model=PATH or a hub id")
    return config.model


def _read_options(config: SpeculatorConfig, defaults: dict[str, int]) -> dict[str, int]:
    """The whole-number options of a method. Raises ConfigError for unknown names and other values."""
    _refuse_options(config, [name for name in config.options if name not in defaults], tuple(defaults))
    values = dict(defaults)
    for name, text in config.options.items():
        if not text.isdecimal():
            raise ConfigError(f"speculator {config.method}: got {name}={text!r}, expected a whole number")
        values[name] = int(text)
    return values


def _refuse_options(config: SpeculatorConfig, unknown: Iterable[str], known: Sequence[str]) -> None:
    for name in unknown:
        expected = ", ".join(known) or "none"
        raise ConfigError(f"speculator {config.method}: got option {name!r}, expected one of: {expected}")
