"""Registered draft methods on a real model, SmolLM2 in float32: the tokens of plain decoding.

Matrix products are not bit-equal across row counts there, so a near-tie could decide; a mismatch prints how far the two
largest logits were apart. In the long form also the model as its own drafter, and EAGLE heads that are fitted to it for
some steps on the very texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.assembly import assemble
from engine.checkpoint.tokenizer_files import load_hf_tokenizer
from engine.config import ModelConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.models.loader import LoadedModel, load_model
from tests.support.engine_harness import Harness, Result, request
from tests.support.gguf_reference import load_gguf_reference
from tests.support.prompts import PROMPTS
from tests.support.smollm2 import smollm2_gguf, smollm2_reference
from tests.support.tiny_heads import HeadTarget, make_tiny_head

CPU = torch.device("cpu")
K = 4
HEAD_K = 2  # of heads that are fitted for less than a minute
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
}


@dataclass
class SmolLM2:
    loaded: LoadedModel
    prompts: list[list[int]]
    plain: dict[tuple[str, int, int], dict[str, Result]] = field(default_factory=dict)

    def run(
        self, setting: str, num_prompts: int, max_tokens: int, config: SpeculatorConfig | None
    ) -> dict[str, Result]:
        """The first prompts at once, with one method or none."""
        settings = engine_config(
            model={"model": "smollm2"},
            device="cpu",
            max_model_len=256,
            speculators=() if config is None else (config,),
            draft_policy="first",
            scheduler={"max_prefill_stall": None, "check_invariants": True},
            cache={"num_blocks": 512},
        )
        core = EngineCore(
            settings, build=lambda config, on_progress: assemble(config, self.loaded, device=CPU)
        )
        k = None if config is None else config.k
        return Harness(core).run(
            [
                request(f"r{index}", prompt, max_tokens=max_tokens, k=k, **SETTINGS[setting])
                for index, prompt in enumerate(self.prompts[:num_prompts])
            ]
        )

    def expected(self, setting: str, num_prompts: int, max_tokens: int) -> dict[str, Result]:
        key = (setting, num_prompts, max_tokens)
        if key not in self.plain:
            self.plain[key] = self.run(*key, None)
        return self.plain[key]


@pytest.fixture(scope="module")
def smollm2() -> SmolLM2:
    config = ModelConfig(model=str(smollm2_gguf()), dtype="float32")
    tokenizer = load_hf_tokenizer(config)
    # The text twice: something to look up.
    prompts = [tokenizer(f"{prompt}\n{prompt}")["input_ids"] for prompt in PROMPTS]
    return SmolLM2(load_model(config, device=CPU), prompts)


def check(
    smollm2: SmolLM2, config: SpeculatorConfig, setting: str, num_prompts: int, max_tokens: int
) -> list[Result]:
    expected = smollm2.expected(setting, num_prompts, max_tokens)
    results = smollm2.run(setting, num_prompts, max_tokens, config)
    for index, prompt in enumerate(smollm2.prompts[:num_prompts]):
        got, wanted = results[f"r{index}"], expected[f"r{index}"]
        assert got.token_ids == wanted.token_ids, describe_mismatch(prompt, got.token_ids, wanted.token_ids)
        assert got.finish == wanted.finish
    return list(results.values())


def describe_mismatch(prompt: Sequence[int], got: Sequence[int], wanted: Sequence[int]) -> str:
    """Where the two part, and the margin between the two largest raw logits there."""
    place = next(index for index, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1])
    sequence = torch.tensor([[*prompt, *wanted[:place]]])
    with torch.no_grad():
        top = smollm2_reference()(sequence).logits[0, -1].topk(2)
    margin = float(top.values.diff().abs())
    return f"token {place}: got {got[place]}, expected {wanted[place]}; top-2 margin {margin:.3g}"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookup_methods_write_the_plain_text(smollm2: SmolLM2, method: str) -> None:
    results = check(smollm2, SpeculatorConfig(method=method, k=K), "greedy", 4, 32)
    assert any(item.num_accepted for result in results for item in result.spec)


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_every_method_without_training_writes_the_plain_text(
    smollm2: SmolLM2, method: str, setting: str
) -> None:
    model = str(smollm2_gguf()) if method == "draft_model" else None
    results = check(smollm2, SpeculatorConfig(method=method, model=model, k=K), setting, 12, 64)
    if method == "draft_model":
        seen = [item for result in results for item in result.spec]
        accepted, drafted = (
            sum(getattr(item, name) for item in seen) for name in ("num_accepted", "num_drafted")
        )
        assert accepted >= 0.95 * drafted, "the model does not agree with itself"


@pytest.mark.full
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_fitted_heads_write_the_plain_text(
    smollm2: SmolLM2, method: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    num_prompts, max_tokens = 12, 48
    plain = smollm2.expected("greedy", num_prompts, max_tokens)
    sequences = [
        [*prompt, *plain[f"r{index}"].token_ids] for index, prompt in enumerate(smollm2.prompts[:num_prompts])
    ]
    folder = tmp_path_factory.mktemp(method)
    target = HeadTarget(load_gguf_reference(smollm2_gguf()))
    make_tiny_head(folder, method, target, sequences, steps=180, learning_rate=1e-3, std=0.02)
    config = SpeculatorConfig(method=method, model=str(folder), k=HEAD_K)
    for setting in SETTINGS:
        results = check(smollm2, config, setting, num_prompts, max_tokens)
        if setting == "greedy":
            accepted = {item.num_accepted for result in results for item in result.spec}
            assert accepted == {0, 1, HEAD_K}, (
                f"got runs of {accepted} accepted drafts, expected none, some and all"
            )
