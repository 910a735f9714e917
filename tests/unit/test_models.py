"""Every registered model against transformers on tiny random checkpoints, in float64 so that nothing is a
near-tie.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.config import ModelConfig
from engine.models.base import CausalLM
from engine.models.loader import load_model
from engine.models.registry import MODELS
from tests.support.paged_forward import PagedForward
from tests.support.tiny_models import TINY_MODEL_TYPES, TINY_VOCAB_SIZE, TinyModelType, make_tiny_checkpoint
from tests.support.tiny_moe import TINY_MOE_KINDS

CPU = torch.device("cpu")
TOLERANCE = 1e-9
Logits = Callable[[list[int]], torch.Tensor]


def _exact_norm(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """transformers' RMSNorm computes in float32 even for float64 models; ours does not."""
    is_gemma3 = type(module).__name__.startswith("Gemma3")
    eps = module.eps if is_gemma3 else module.variance_epsilon

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = module.weight + 1.0 if is_gemma3 else module.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    return forward


def _reference(path: Path) -> Logits:
    """Logits [num_tokens, vocab] of transformers, all tokens at once."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _exact_norm(module)

    @torch.inference_mode()
    def logits(token_ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([token_ids])).logits[0]

    return logits


def _load(path: Path) -> CausalLM:
    return load_model(ModelConfig(model=str(path)), device=CPU).model


def _prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(TINY_VOCAB_SIZE), k=length)


@pytest.fixture(scope="module", params=TINY_MODEL_TYPES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Logits]:
    model_type: TinyModelType = request.param
    path = make_tiny_checkpoint(tmp_path_factory.mktemp(model_type), model_type)
    return _load(path), _reference(path)


def test_every_registered_model_is_compared() -> None:
    """Gemma 4 in test_gemma4_model.py and models with experts in test_moe_models.py, by references of their own."""
    experts = [kind for kind in TINY_MOE_KINDS if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    compared = [
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in (*TINY_MODEL_TYPES, "gemma4_text", *experts)
    ]
    assert {MODELS.get(name) for name in MODELS.names()} == {MODELS.get(name) for name in compared}


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 33, 90])
def test_prefill_in_chunks_equals_transformers(
    tiny: tuple[CausalLM, Logits], chunk: int, block_size: int
) -> None:
    model, reference = tiny
    prompt = _prompt(90)
    forward = PagedForward(model, num_requests=1, max_tokens=96, block_size=block_size, dtype=torch.float64)
    logits = torch.cat(
        [forward.step([(0, prompt[start : start + chunk])])[0] for start in range(0, len(prompt), chunk)]
    )
    assert (logits - reference(prompt)).abs().max() < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 16])
def test_mixed_batch_equals_each_request_alone(tiny: tuple[CausalLM, Logits], block_size: int) -> None:
    """Decodes of one token, verifications of four and two, and a chunk, in one step; lengths far apart."""
    model, reference = tiny
    lengths = [5, 300, 40, 17, 60]
    next_counts = [1, 1, 4, 2, 70]
    prompts = [
        _prompt(length + count, seed)
        for seed, (length, count) in enumerate(zip(lengths, next_counts, strict=True))
    ]
    forward = PagedForward(model, num_requests=5, max_tokens=304, block_size=block_size, dtype=torch.float64)
    forward.step([(request, prompts[request][:length]) for request, length in enumerate(lengths)])
    order = [0, 2, 1, 3, 4]
    outputs = forward.step([(request, prompts[request][lengths[request] :]) for request in order])
    for request, logits in zip(order, outputs, strict=True):
        expected = reference(prompts[request])[lengths[request] :]
        assert (logits - expected).abs().max() < TOLERANCE, f"request {request}"
