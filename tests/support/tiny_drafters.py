"""A tiny target with habits, what plain decoding makes of it, and for every registered draft method a drafter that is
right now and then: fitted to the very sequences that the plain engine emits.

A new registry line needs one entry in CHECKPOINT_MAKERS, and one in FAMILIES if it drafts for some target models only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.assembly import assemble
from engine.config import EngineConfig, ModelConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.executor import Executor
from engine.messages import AddRequest
from engine.models.loader import LoadedModel, load_model
from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from engine.spec_decode.registry import init_speculator
from engine.spec_decode.speculator import BaseSpeculator
from tests.support.engine_harness import DeferredExecutor, Harness, Result, request
from tests.support.tiny_gemma4 import make_tiny_assistant, make_tiny_gemma4_target
from tests.support.tiny_heads import HeadReference, TinyTarget, make_tiny_head
from tests.support.tiny_models import (
    HABITUAL_TOKENS,
    TINY_EOS_TOKEN_ID,
    make_tiny_checkpoint,
    make_tiny_tokenizer,
)
from tests.support.tiny_mtp import MTP_TARGET_MAKERS, MoETarget, add_mtp_layer

MAX_TOKENS = 24
MAX_DRAFTS = 5
MAX_MODEL_LEN = 72
PROMPT_LENGTHS = (
    1,
    2,
    5,
    9,
    12,
    13,
    14,
    15,
    16,
    17,
    18,
    23,
    31,
    32,
    33,
    40,
)  # around blocks, chunks and drafts

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "penalties": {"repetition_penalty": 1.05, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "logit_bias": {"logit_bias": {261: 2.0, 270: -100.0, 280: 1.5}},
    "min_tokens": {"min_tokens": 9, "logit_bias": {TINY_EOS_TOKEN_ID: 4.0}},
    "stop_strings": {"logprobs": 2},  # each request has its own, taken from its greedy text
    "logprobs": {"temperature": 0.8, "seed": 11, "logprobs": 4},
}


def make_prompts() -> list[list[int]]:
    """Half of them repeat themselves, as prompt lookup needs it."""
    generator = random.Random(0)
    prompts = []
    for index, length in enumerate(PROMPT_LENGTHS):
        tokens = generator.choices(HABITUAL_TOKENS[1:], k=length)
        period = max(length // 3, 1)
        prompts.append([tokens[i % period] for i in range(length)] if index % 2 else tokens)
    return prompts


class Workshop:
    """Target, tokenizer, plain runs and drafters, each made once, on demand."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder = folder
        self.family = family
        self.prompts = make_prompts()
        self._plain: dict[str, dict[str, Result]] = {}
        self._drafters: dict[str, SpeculatorConfig] = {}
        self.references: dict[str, HeadReference] = {}  # of the heads that were made

    @cached_property
    def target_path(self) -> Path:
        return TARGET_MAKERS[self.family](self.folder / "target")

    @cached_property
    def target(self) -> TinyTarget | MoETarget:
        """What the target computes, by code that is not ours or by the definition."""
        return (
            MoETarget(self.target_path) if self.family in MTP_TARGET_MAKERS else TinyTarget(self.target_path)
        )

    @cached_property
    def tokenizer_path(self) -> Path:
        return make_tiny_tokenizer(self.folder / "tokenizer")

    @cached_property
    def loaded(self) -> LoadedModel:
        return load_model(ModelConfig(model=str(self.target_path)), device=torch.device("cpu"))

    @cached_property
    def sequences(self) -> list[list[int]]:
        """Prompts and what plain decoding makes of them, greedy and seeded."""
        return [
            [*prompt, *result.token_ids]
            for setting in ("greedy", "seeded")
            for prompt, result in zip(self.prompts, self.plain(setting).values(), strict=True)
        ]

    def params(self, setting: str) -> list[dict[str, Any]]:
        """Sampling parameters of each prompt's request."""
        values = {"max_tokens": MAX_TOKENS, **SETTINGS[setting]}
        if setting != "stop_strings":
            return [dict(values) for _ in self.prompts]
        return [{**values, "stop_strings": (stop,)} for stop in self._stop_strings]

    @cached_property
    def _stop_strings(self) -> list[str]:
        """Characters that end in the middle of each request's greedy text, or beyond it."""
        tokenizer = Tokenizer.from_file(str(self.tokenizer_path / "tokenizer.json"))
        texts = [tokenizer.decode(result.token_ids[18:22]) for result in self.plain("greedy").values()]
        return [text[1:4] or "nowhere" for text in texts]

    def plain(self, setting: str) -> dict[str, Result]:
        """What the requests get without speculation."""
        if setting not in self._plain:
            self._plain[setting] = Harness(self.core(())).run(self.requests(setting, [(None, None)]))
        return self._plain[setting]

    def drafter(self, method: str) -> SpeculatorConfig:
        """What loads the method with its checkpoint. Fails the test for a method that has no maker."""
        if method not in CHECKPOINT_MAKERS:
            pytest.fail(
                f"draft method {method!r} is registered, but CHECKPOINT_MAKERS in {__name__} does not know it"
            )
        if self.family not in families_of(method):
            pytest.fail(f"draft method {method!r} does not draft for a target of the family {self.family!r}")
        if method not in self._drafters:
            values = CHECKPOINT_MAKERS[method](self, self.folder / method)
            self._drafters[method] = SpeculatorConfig.model_validate(
                {"method": method, "k": MAX_DRAFTS, **values}
            )
        return self._drafters[method]

    def draft_model(self, config: SpeculatorConfig) -> AutoRegressiveSpeculator:
        """A fresh instance, as the registry makes it."""
        speculator = init_speculator(config, self.loaded, torch.device("cpu"))
        assert isinstance(speculator, AutoRegressiveSpeculator)
        return speculator

    def core(
        self,
        configs: Sequence[SpeculatorConfig],
        *,
        speculators: Mapping[str, BaseSpeculator] | None = None,
        depth: int = 1,
        block_size: int = 16,
        num_blocks: int | None = None,
        config: Mapping[str, Any] | None = None,
        **scheduler: Any,
    ) -> EngineCore:
        """An engine with these methods; at depth 2 steps run only when they are collected."""
        settings = engine_config(
            model={"model": str(self.target_path), "tokenizer": str(self.tokenizer_path)},
            device="cpu",
            speculators=tuple(configs),
            max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=depth,
            scheduler={"max_prefill_stall": None, "check_invariants": True, **scheduler},
            cache={"block_size": block_size, "num_blocks": num_blocks or 4096 // block_size},
            **{"draft_policy": "first", **(config or {})},
        )

        def wrap(executor: Executor) -> Executor:
            return DeferredExecutor(executor) if depth > 1 else executor

        def build(config: EngineConfig, on_progress: Callable[..., None]) -> Any:
            device = torch.device("cpu")
            return assemble(config, self.loaded, device=device, speculators=speculators, wrap_executor=wrap)

        return EngineCore(settings, build=build)

    def requests(self, setting: str, choices: Sequence[tuple[str | None, int | None]]) -> list[AddRequest]:
        """The prompts as requests r0, r1, ...; (method, k) go around."""
        return [
            request(f"r{index}", prompt, method=method, k=k, **params)
            for index, (prompt, params, (method, k)) in enumerate(
                zip(self.prompts, self.params(setting), cycle(choices), strict=False)
            )
        ]


def shared_workshop(factory: pytest.TempPathFactory, family: str = "llama") -> Workshop:
    """One of each family for the whole test session."""
    return _make_workshop(factory.getbasetemp() / f"workshop-{family}", family)


@cache
def _make_workshop(folder: Path, family: str) -> Workshop:
    return Workshop(folder, family)


def families_of(method: str) -> tuple[str, ...]:
    """The target families that a draft method drafts for; the tests of the registry use the first."""
    return FAMILIES.get(method, tuple(TARGET_MAKERS))


def _make_llama(path: Path) -> Path:
    """Random weights, with two changes: the newest token matters most, and a few tokens get nearly all probability.
    So texts fall into loops now and then, as real ones do, and drafts can be right.
    """
    make_tiny_checkpoint(path, "llama")
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"] *= 4.0
    head = weights["lm_head.weight"]
    habitual = torch.zeros(len(head), dtype=torch.bool)
    habitual[list(HABITUAL_TOKENS)] = True
    head *= torch.where(habitual, 2.5, 0.1)[:, None]
    head[TINY_EOS_TOKEN_ID] *= 0.3
    save_file(weights, file, metadata={"format": "pt"})
    return path


def _make_gemma3(path: Path) -> Path:
    """Full and sliding layers. Its head is its embedding, which is small beside what the layers add: else every token
    would repeat itself.
    """
    make_tiny_checkpoint(path, "gemma3_text", seed=1)
    file = path / "model.safetensors"
    weights = load_file(file)
    table, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    habitual = torch.zeros(len(table), dtype=torch.bool)
    habitual[list(HABITUAL_TOKENS)] = True
    table *= torch.where(habitual, 0.05, 0.005)[:, None]
    norm.copy_((1.0 + norm) * 60.0 - 1.0)  # a norm multiplies by 1 + its weight
    save_file(weights, file, metadata={"format": "pt"})
    return path


TARGET_MAKERS: Mapping[str, Callable[[Path], Path]] = {
    "llama": _make_llama,
    "gemma3": _make_gemma3,
    "gemma4_ple": partial(make_tiny_gemma4_target, kind="ple_shared"),
    "gemma4_moe": partial(make_tiny_gemma4_target, kind="moe_keqv"),
    **MTP_TARGET_MAKERS,
}
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "draft_model": ("llama", "gemma3"),
    "eagle": ("llama",),
    "eagle3": ("llama",),
    "gemma4_mtp": ("gemma4_ple", "gemma4_moe"),
    "mtp": tuple(MTP_TARGET_MAKERS),
}


# ---- checkpoints by method: (workshop, folder) -> fields of SpeculatorConfig --------------------------------------


def _options(**options: str) -> Callable[[Workshop, Path], dict[str, Any]]:
    """Of a method without a checkpoint."""
    return lambda workshop, folder: {"options": options}


def _make_noisy_target(workshop: Workshop, folder: Path) -> dict[str, Any]:
    """The target with noise on its weights."""
    folder.mkdir(parents=True)
    weights = load_file(workshop.target_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for weight in weights.values():
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight += 0.1 * weight.std() * noise
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((workshop.target_path / "config.json").read_text())
    return {"model": str(folder)}


def _make_head(workshop: Workshop, folder: Path) -> dict[str, Any]:
    method = folder.name
    assert isinstance(workshop.target, TinyTarget)
    workshop.references[method] = make_tiny_head(folder, method, workshop.target, workshop.sequences)
    return {"model": str(folder)}


def _make_assistant(workshop: Workshop, folder: Path) -> dict[str, Any]:
    make_tiny_assistant(folder, workshop.target_path, workshop.sequences)
    return {"model": str(folder)}


def _make_mtp_layer(workshop: Workshop, folder: Path) -> dict[str, Any]:
    """Added to the target's own checkpoint."""
    assert isinstance(workshop.target, MoETarget)
    workshop.references["mtp"] = add_mtp_layer(workshop.target, workshop.sequences)
    return {}


CHECKPOINT_MAKERS: Mapping[str, Callable[[Workshop, Path], dict[str, Any]]] = {
    "ngram": _options(min_n="1"),
    "suffix": _options(min_match="1"),
    "draft_model": _make_noisy_target,
    "eagle": _make_head,
    "eagle3": _make_head,
    "gemma4_mtp": _make_assistant,
    "mtp": _make_mtp_layer,
}
