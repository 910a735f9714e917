"""DeepSeek V2 and V3 and GLM-4.5 against transformers, and against the definition in float64, in every form of the
cache: absorbed, expanded, chunked, mixed batches.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import latent
from engine.config import ModelConfig
from engine.models.loader import load_model
from engine.models.moe_decoder import MoEDecoder
from tests.support.paged_forward import PagedForward
from tests.support.tiny_models import TINY_VOCAB_SIZE
from tests.support.tiny_moe import (
    TINY_MOE_KINDS,
    TinyMoEKind,
    make_tiny_moe,
    read_checkpoint,
    reference_hidden,
    transformers_logits,
)

CPU = torch.device("cpu")
EXACT = 1e-9  # float64
FLOAT32_PARTS = 1e-5  # of a float64 model whose norms and routers compute in float32
LENGTH = 90


class Tiny:
    """A checkpoint, our model of it, and what its logits should be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        model = load_model(ModelConfig(model=str(path)), device=CPU).model
        assert isinstance(model, MoEDecoder)
        self.model = model
        self._config, self._weights = read_checkpoint(path)

    def reference(self, token_ids: list[int]) -> torch.Tensor:
        hidden = reference_hidden(self._config, self._weights, torch.tensor(token_ids))
        return hidden @ self._weights["lm_head.weight"].T

    def forward(self, block_size: int = 16, num_requests: int = 1, max_tokens: int = 96) -> PagedForward:
        return PagedForward(
            self.model,
            num_requests=num_requests,
            max_tokens=max_tokens,
            block_size=block_size,
            dtype=self.model.dtype,
        )

    def in_chunks(self, token_ids: list[int], chunk: int, block_size: int = 16) -> torch.Tensor:
        forward = self.forward(block_size)
        starts = range(0, len(token_ids), chunk)
        return torch.cat([forward.step([(0, token_ids[start : start + chunk])])[0] for start in starts])


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(TINY_VOCAB_SIZE), k=length)


@pytest.fixture(scope="module", params=TINY_MOE_KINDS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    kind: TinyMoEKind = request.param
    return Tiny(make_tiny_moe(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture(params=[1, 20, 1000], ids=["expanded", "by_length", "absorbed"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Query tokens from which on a request is expanded."""
    monkeypatch.setattr(latent, "MIN_EXPANDED_QUERY_LEN", request.param)
    return int(request.param)


def test_the_definition_equals_transformers(tiny: Tiny) -> None:
    token_ids = prompt(LENGTH)
    assert (tiny.reference(token_ids) - transformers_logits(tiny.path, token_ids)).abs().max() < FLOAT32_PARTS


@pytest.mark.parametrize("kind", TINY_MOE_KINDS)
def test_float32_equals_transformers(kind: TinyMoEKind, form: int, tmp_path: Path) -> None:
    tiny = Tiny(make_tiny_moe(tmp_path, kind, dtype="float32"))
    token_ids = prompt(LENGTH)
    expected = transformers_logits(tiny.path, token_ids)
    for chunk in (LENGTH, 33):
        assert (tiny.in_chunks(token_ids, chunk) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 33, LENGTH])
def test_prefill_in_chunks(tiny: Tiny, chunk: int, block_size: int, form: int) -> None:
    token_ids = prompt(LENGTH)
    got = tiny.in_chunks(token_ids, chunk, block_size)
    assert (got - tiny.reference(token_ids)).abs().max() < EXACT


def test_mixed_batch(tiny: Tiny, form: int) -> None:
    """Decodes of one token, verifications of four and two, and chunks between them, in one step."""
    lengths, next_counts = [5, 60, 40, 17, 30], [1, 1, 4, 2, 25]
    prompts = [
        prompt(length + count, seed)
        for seed, (length, count) in enumerate(zip(lengths, next_counts, strict=True))
    ]
    forward = tiny.forward(num_requests=5, max_tokens=64)
    forward.step([(request, prompts[request][:length]) for request, length in enumerate(lengths)])
    order = [4, 0, 2, 1, 3]
    outputs = forward.step([(request, prompts[request][lengths[request] :]) for request in order])
    for request, logits in zip(order, outputs, strict=True):
        expected = tiny.reference(prompts[request])[lengths[request] :]
        assert (logits - expected).abs().max() < EXACT, f"request {request}"


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v3_yarn"])
def test_triton_computes_what_torch_computes(kind: TinyMoEKind, form: int, tmp_path: Path) -> None:
    """In the interpreter on a machine without a GPU."""
    backend = pytest.importorskip("engine.attention.triton_backend", reason="triton is not installed here")
    model = Tiny(make_tiny_moe(tmp_path, kind, dtype="float32")).model
    first, second = prompt(30), prompt(41, seed=1)
    outputs = []
    for chosen in (None, backend.TritonAttentionBackend()):
        forward = PagedForward(
            model, num_requests=2, max_tokens=48, block_size=4, dtype=torch.float32, backend=chosen
        )
        forward.step([(0, first[:29]), (1, second[:20])])
        outputs.append(torch.cat(forward.step([(0, first[29:]), (1, second[20:])])))
    assert (outputs[0] - outputs[1]).abs().max() < 1e-4


def test_a_latent_cache_has_one_row_a_token(tiny: Tiny) -> None:
    (group,) = tiny.model.kv_groups()
    if group.value_size is None:
        pytest.skip("a family with keys and values")
    assert (group.num_kv_heads, group.head_size, group.value_size) == (1, 24, 16)
    assert group.bytes_per_token == 3 * 24 * 8
    forward = tiny.forward()
    forward.step([(0, prompt(5))])
    for cache in forward.caches.values():
        assert cache.value.untyped_storage().data_ptr() == cache.key.untyped_storage().data_ptr()
        assert cache.key.untyped_storage().nbytes() == cache.key.numel() * 8


def test_what_experts_are_chosen_varies(tiny: Tiny) -> None:
    """Else the router could be wrong and nobody would see it."""
    seen: set[int] = set()
    for module in tiny.model.modules():
        if type(module).__name__ == "ExpertRouter":
            module.register_forward_hook(
                lambda _module, _inputs, output: seen.update(output[0].flatten().tolist())
            )
    tiny.forward().step([(0, prompt(LENGTH))])
    assert seen == set(range(8))


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    path = make_tiny_moe(tmp_path, "deepseek_v3", dtype="float32")
    (path / "model.safetensors").unlink()
    config: dict[str, Any] = {"model": str(path), "load_format": "dummy"}
    loaded = load_model(ModelConfig(**config), device=CPU)
    assert loaded.source is None
    logits = PagedForward(
        loaded.model, num_requests=1, max_tokens=16, block_size=4, dtype=torch.float32
    ).step([(0, prompt(10))])[0]
    assert logits.isfinite().all()
