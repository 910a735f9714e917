"""Gemma 4 targets at every position of sequences many windows long: against the definition in float64, and against
transformers in float32.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import ModelConfig
from engine.models.base import CausalLM
from engine.models.loader import load_model
from tests.support.gemma4_reference import FULL, SLIDING, Gemma4Reference
from tests.support.paged_forward import PagedForward
from tests.support.tiny_gemma4 import GEMMA4_KINDS, WINDOW, Gemma4Kind, make_tiny_gemma4_target
from tests.support.tiny_models import TINY_VOCAB_SIZE

CPU = torch.device("cpu")
LENGTH = 12 * WINDOW + 3


def load(path: Path, **options: Any) -> CausalLM:
    return load_model(ModelConfig(model=str(path), **options), device=CPU).model


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(TINY_VOCAB_SIZE), k=length)


@pytest.fixture(scope="module", params=GEMMA4_KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: Gemma4Kind = request.param
    return make_tiny_gemma4_target(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return load(path)


@pytest.fixture(scope="module")
def reference(path: Path) -> Gemma4Reference:
    return Gemma4Reference.load(path)


def run_in_chunks(model: CausalLM, prompt: list[int], chunk: int, block_size: int) -> torch.Tensor:
    """[len(prompt), vocab_size]"""
    dtype = next(model.parameters()).dtype
    forward = PagedForward(model, num_requests=1, max_tokens=128, block_size=block_size, dtype=dtype)
    starts = range(0, len(prompt), chunk)
    return torch.cat([forward.step([(0, prompt[start : start + chunk])])[0] for start in starts])


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 64, LENGTH])
def test_prefill_in_chunks_equals_the_definition(
    model: CausalLM, reference: Gemma4Reference, chunk: int, block_size: int
) -> None:
    prompt = make_prompt(LENGTH)
    logits = run_in_chunks(model, prompt, chunk, block_size)
    assert (logits - reference.run(torch.tensor(prompt)).logits).abs().max() < 1e-9


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_mixed_batch_equals_each_request_alone(
    model: CausalLM, reference: Gemma4Reference, block_size: int
) -> None:
    """Decodes of one token, verifications of four and two, and a chunk, in one step; lengths far apart."""
    lengths, next_counts = [5, 90, 40, 17, 60], [1, 1, 4, 2, 30]
    prompts = [
        make_prompt(length + n, seed)
        for seed, (length, n) in enumerate(zip(lengths, next_counts, strict=True))
    ]
    forward = PagedForward(model, num_requests=5, max_tokens=96, block_size=block_size, dtype=torch.float64)
    forward.step([(request, prompts[request][:length]) for request, length in enumerate(lengths)])
    order = [0, 2, 1, 3, 4]
    outputs = forward.step([(request, prompts[request][lengths[request] :]) for request in order])
    for request, logits in zip(order, outputs, strict=True):
        expected = reference.run(torch.tensor(prompts[request])).logits[lengths[request] :]
        assert (logits - expected).abs().max() < 1e-9, f"request {request}"


@torch.inference_mode()
def test_logits_equal_transformers_in_float32(path: Path) -> None:
    prompt = make_prompt(LENGTH)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected = theirs(torch.tensor([prompt]), use_cache=False).logits[0]
    logits = run_in_chunks(load(path, dtype="float32"), prompt, 7, 16)
    assert (logits - expected).abs().max() < 1e-3


@torch.inference_mode()
def test_embeddings_are_scaled_by_the_root_as_the_dtype_rounds_it(path: Path) -> None:
    """The root of 48 is 6.9282, in bfloat16 6.9375."""
    table = Gemma4Reference.load(path).weights["model.embed_tokens.weight"]
    ids = torch.arange(TINY_VOCAB_SIZE)
    assert torch.equal(load(path).embed(ids), table * 48**0.5)
    half = load(path, dtype="bfloat16").embed(ids)
    assert torch.equal(half, table.bfloat16() * torch.tensor(6.9375).bfloat16())


def test_groups_and_shared_layers_are_those_of_the_config(
    model: CausalLM, reference: Gemma4Reference
) -> None:
    """Shared layers own nothing; a drafter reads the last layer of each type that does."""
    first_shared = len(reference.kinds) - reference.config["num_kv_shared_layers"]
    own = {
        kind: tuple(i for i in range(first_shared) if reference.kinds[i] == kind) for kind in (FULL, SLIDING)
    }
    assert {group.window: group.layer_indices for group in model.kv_groups()} == {
        None: own[FULL],
        WINDOW: own[SLIDING],
    }
    assert dict(model.shareable_kv()) == {kind: layers[-1] for kind, layers in own.items()}
