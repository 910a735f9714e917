"""Greedy tokens are those of transformers, however the work is cut up: tiny Llama, Qwen2 and Qwen3 in float64, and
SmolLM2 in float32.

Tiny models get every combination; SmolLM2 a pairwise sample here and every combination with the marker `full`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.checkpoint.tokenizer_files import load_hf_tokenizer
from engine.config import ModelConfig
from engine.models.loader import LoadedModel, load_model
from tests.support.engine_harness import Harness, make_core, request
from tests.support.prompts import PROMPTS
from tests.support.scripted_speculators import PATTERNS, ScriptedSpeculator
from tests.support.smollm2 import smollm2_gguf, smollm2_reference
from tests.support.tiny_models import TINY_MODEL_TYPES, make_tiny_checkpoint

CPU = torch.device("cpu")
MAX_MODEL_LEN = 256

Prompt = tuple[int, ...]
Expected = Mapping[Prompt, Sequence[int]]


@dataclass(frozen=True)
class Layout:
    """How the same requests are cut up."""

    at_once: int  # requests in the engine at a time
    chunk: int | None
    block_size: int
    depth: int  # two: collected late, too
    pattern: str | None = None
    k: int = 0
    num_tokens_of_pool: int = 8192  # small: preemption


LAYOUTS = [
    Layout(at_once, chunk, block_size, depth)
    for at_once, chunk, block_size, depth in itertools.product((1, 16), (1, 7, 64), (1, 16), (1, 2))
]
DRAFTS = [Layout(16, 64, 16, 2, pattern, k) for pattern in PATTERNS for k in (1, 2, 3, 4, 5)]
PAIRWISE = [
    Layout(1, 64, 16, 1),
    Layout(16, 7, 1, 2),
    Layout(16, 64, 16, 2, "cycling", 3),
    Layout(16, 7, 16, 1, "oracle", 5),
    Layout(16, None, 1, 2, "always_wrong", 1),
    Layout(16, 64, 16, 2, "fewer_than_k", 4, num_tokens_of_pool=128),
]


def run(
    loaded: LoadedModel, expected: Expected, layout: Layout, *, max_tokens: int, rounds: int = 1
) -> Iterator[dict[Prompt, list[int]]]:
    """The tokens of every prompt, once per round; later rounds hit the prefix cache."""
    speculators = None
    if layout.pattern is not None:
        futures = {prompt: [*tokens, *([0] * 8)] for prompt, tokens in expected.items()}
        speculators = {"scripted": ScriptedSpeculator(PATTERNS[layout.pattern], futures)}
    core = make_core(
        loaded,
        speculators=speculators,
        k=layout.k,
        deferred=layout.depth == 2,
        config={
            "max_steps_in_flight": layout.depth,
            "max_model_len": min(MAX_MODEL_LEN, layout.num_tokens_of_pool),
        },
        scheduler={"max_prefill_chunk": layout.chunk, "max_num_seqs": max(layout.at_once, 16)},
        cache={"block_size": layout.block_size, "num_blocks": layout.num_tokens_of_pool // layout.block_size},
    )
    names = {prompt: f"r{index}" for index, prompt in enumerate(expected)}
    for _ in range(rounds):
        harness = Harness(core)
        requests = [request(name, prompt, max_tokens=max_tokens) for prompt, name in names.items()]
        for first in range(0, len(requests), layout.at_once):
            harness.run(requests[first : first + layout.at_once])
        if layout.num_tokens_of_pool < 1024:
            assert sum(result.num_preemptions for result in harness.results.values()) > 0
        yield {prompt: harness.results[name].token_ids for prompt, name in names.items()}


def generate(model: Any, prompts: Sequence[Prompt], max_tokens: int) -> dict[Prompt, list[int]]:
    """By transformers, one prompt at a time."""
    result = {}
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        result[prompt] = output[0, len(prompt) :].tolist()
    return result


# ---- tiny models ---------------------------------------------------------------------------------------------------

TINY_MAX_TOKENS = 16


@dataclass(frozen=True)
class Tiny:
    loaded: LoadedModel
    expected: Expected


@pytest.fixture(scope="module", params=TINY_MODEL_TYPES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    generator = random.Random(4)
    lengths = (1, 2, 3, 6, 7, 8, 13, 14, 15, 16, 17, 20, 31, 32, 33, 65)
    prompts = [tuple(generator.randrange(3, 320) for _ in range(length)) for length in lengths]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    loaded = load_model(ModelConfig(model=str(path)), device=CPU)
    return Tiny(loaded, generate(model, prompts, TINY_MAX_TOKENS))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tiny_models_in_every_layout_and_with_prefix_hits(tiny: Tiny, layout: Layout) -> None:
    rounds = 1 if layout.at_once == 1 else 2
    for tokens in run(tiny.loaded, tiny.expected, layout, max_tokens=TINY_MAX_TOKENS, rounds=rounds):
        assert tokens == tiny.expected


@pytest.mark.parametrize("layout", DRAFTS, ids=str)
def test_tiny_models_with_scripted_drafts(tiny: Tiny, layout: Layout) -> None:
    for tokens in run(tiny.loaded, tiny.expected, layout, max_tokens=TINY_MAX_TOKENS):
        assert tokens == tiny.expected


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_tiny_models_under_forced_preemption(tiny: Tiny, depth: int, k: int) -> None:
    layout = Layout(16, 7, 4, depth, "cycling" if k else None, k, num_tokens_of_pool=128)
    for tokens in run(tiny.loaded, tiny.expected, layout, max_tokens=TINY_MAX_TOKENS):
        assert tokens == tiny.expected


# ---- SmolLM2 -------------------------------------------------------------------------------------------------------

SMOLLM2_MAX_TOKENS = 64
SAMPLE_MAX_TOKENS = 16


@dataclass(frozen=True)
class SmolLM2:
    reference: Any
    loaded: LoadedModel
    prompts: list[Prompt]


@pytest.fixture(scope="module")
def smollm2() -> SmolLM2:
    path = smollm2_gguf()
    config = ModelConfig(model=str(path), dtype="float32")
    tokenizer = load_hf_tokenizer(config)
    return SmolLM2(
        smollm2_reference(),
        load_model(config, device=CPU),
        [tuple(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS],
    )


def assert_greedy(reference: Any, prompt: Prompt, tokens: Sequence[int], max_tokens: int) -> None:
    """Each token is the argmax of transformers' logits after the tokens before it, so the whole is its greedy text.

    A mismatch prints how far the two largest logits were apart.
    """
    assert len(tokens) == max_tokens or tokens[-1] == 2
    with torch.no_grad():
        output = reference(torch.tensor([[*prompt, *tokens]]), logits_to_keep=len(tokens) + 1)
    logits = output.logits[0, :-1]
    for index, token in enumerate(tokens):
        top = logits[index].topk(2)
        margin = float(top.values[0] - top.values[1])
        assert token == int(top.indices[0]), (
            f"token {index} of {prompt[:5]}...: the top-2 margin is {margin:.3g}"
        )


def test_smollm2_writes_the_greedy_text_of_transformers(smollm2: SmolLM2) -> None:
    layout = Layout(len(smollm2.prompts), None, 16, 1)
    expected: Expected = dict.fromkeys(smollm2.prompts, ())
    (tokens,) = run(smollm2.loaded, expected, layout, max_tokens=SMOLLM2_MAX_TOKENS)
    for prompt in smollm2.prompts:
        assert_greedy(smollm2.reference, prompt, tokens[prompt], SMOLLM2_MAX_TOKENS)


@pytest.fixture(scope="module")
def smollm2_sample(smollm2: SmolLM2) -> Expected:
    return generate(smollm2.reference, smollm2.prompts[:8], SAMPLE_MAX_TOKENS)


@pytest.mark.parametrize("layout", PAIRWISE, ids=str)
def test_smollm2_in_a_pairwise_sample(smollm2: SmolLM2, smollm2_sample: Expected, layout: Layout) -> None:
    for tokens in run(smollm2.loaded, smollm2_sample, layout, max_tokens=SAMPLE_MAX_TOKENS):
        assert tokens == smollm2_sample


@pytest.fixture(scope="module")
def smollm2_whole(smollm2: SmolLM2) -> Expected:
    return generate(smollm2.reference, smollm2.prompts, SMOLLM2_MAX_TOKENS)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", [*LAYOUTS, *DRAFTS, *PAIRWISE[:5]], ids=str)
def test_smollm2_in_every_layout(smollm2: SmolLM2, smollm2_whole: Expected, layout: Layout) -> None:
    for tokens in run(smollm2.loaded, smollm2_whole, layout, max_tokens=SMOLLM2_MAX_TOKENS):
        assert tokens == smollm2_whole
