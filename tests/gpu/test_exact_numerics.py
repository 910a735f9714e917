"""`numerics: exact` in the engine on a CUDA device, its three promises apart: the same tokens

E1 with drafts as without, in the same batch; E2 whoever is beside, and however prompts are cut into chunks; E3 also
after preemptions and on cached prefixes. Greedy and seeded; bfloat16; 20 prompts of 48 tokens, or of 256 with the mark
`full`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.geometries import GEOMETRIES, with_layers
from engine.config import SpeculatorConfig
from engine.core import EngineCore
from tests.support.cuda_engine import make_cuda_core
from tests.support.engine_harness import Harness, Result, request
from tests.support.tiny_drafters import shared_workshop
from tools.fetch_model import models_folder
from tools.known_models import KNOWN_MODELS

pytestmark = pytest.mark.gpu
NUM_PROMPTS = 20
MODELS = Path(__file__).parents[2] / "models"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 7},
    "top_p": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 5},
}
METHODS = {
    "llama": ("ngram", "eagle3"),
    "gemma4_ple": ("ngram", "gemma4_mtp"),
    "gemma4_moe": ("ngram", "gemma4_mtp"),
    "geometry": ("ngram",),
    "smollm2": ("ngram", "eagle3"),
}
Tokens = dict[str, list[int]]


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Of 3 to 140 tokens; half of them repeat themselves, as prompt lookup needs it."""
    generator = random.Random(seed)
    prompts = []
    for index in range(count):
        length = generator.choice((3, 15, 16, 17, 31, 40, 64, 90, 127, 140))
        tokens = generator.choices(range(259, 299), k=length)
        period = max(length // 3, 1)
        prompts.append([tokens[i % period] for i in range(length)] if index % 2 else tokens)
    return prompts


class Target:
    """A checkpoint, its drafters, and what its requests get alone."""

    def __init__(
        self, name: str, path: Path, load_format: str, drafter: Callable[[str], SpeculatorConfig]
    ) -> None:
        self.name = name
        self._model = {"model": str(path), "load_format": load_format, "dtype": "bfloat16"}
        self._drafter = drafter
        self.alone: Callable[[int], Tokens] = cache(self._run_alone)

    def core(self, method: str | None = None, *, chunk: int | None = None, **config: Any) -> EngineCore:
        speculators: tuple[SpeculatorConfig, ...] = ()
        if method is not None:
            speculators = (SpeculatorConfig.model_validate({**self._drafter(method).model_dump(), "k": 4}),)
        scheduler = {"max_num_seqs": 32, "max_prefill_stall": None, "max_prefill_chunk": chunk}
        cache_options = {"num_blocks": 1024, "enable_prefix_cache": False, **config.pop("cache", {})}
        return make_cuda_core(
            model=self._model,
            numerics="exact",
            speculators=speculators,
            max_model_len=512,
            scheduler=scheduler,
            cache=cache_options,
            **config,
        )

    def _run_alone(self, num_tokens: int) -> Tokens:
        core = self.core()
        results: Tokens = {}
        for item in requests(num_tokens):
            results |= tokens_of(Harness(core).run([item]))
        core.close()
        return results


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in METHODS]
)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    name: str = request.param
    if name == "geometry":
        folder = tmp_path_factory.mktemp("geometry")
        config = with_layers(GEOMETRIES["smollm2-135m"], 4)
        (folder / "config.json").write_text(json.dumps({"eos_token_id": 2, **config}))
        return Target(name, folder, "dummy", _released_drafter)
    if name == "smollm2":
        path = models_folder() / KNOWN_MODELS["smollm2"].file_name
        if not path.exists():
            pytest.skip(f"SmolLM2 is not at {path}: python -m tools.fetch_model smollm2")
        return Target(name, path, "auto", _released_drafter)
    workshop = shared_workshop(tmp_path_factory, name)
    return Target(name, workshop.target_path, "auto", workshop.drafter)


def _released_drafter(method: str) -> SpeculatorConfig:
    if method == "ngram":
        return SpeculatorConfig(method=method, options={"min_n": "1"})
    return SpeculatorConfig(method=method, model=str(MODELS / f"smollm2-{method}"))


@pytest.fixture(params=[48, pytest.param(256, marks=pytest.mark.full)])
def num_tokens(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


def requests(
    num_tokens: int, ways: Sequence[str] = tuple(WAYS), seed: int = 0, suffix: str = ""
) -> list[Any]:
    """Every prompt in every way."""
    return [
        request(f"{way} {index}{suffix}", prompt, max_tokens=num_tokens, ignore_eos=True, **WAYS[way])
        for way in ways
        for index, prompt in enumerate(make_prompts(NUM_PROMPTS, seed))
    ]


def tokens_of(results: dict[str, Result]) -> Tokens:
    return {name: result.token_ids for name, result in results.items()}


def run(core: EngineCore, items: Sequence[Any]) -> dict[str, Result]:
    results = Harness(core).run(items)
    core.close()
    return results


def assert_same(results: dict[str, Result], expected: Tokens) -> None:
    """Of the requests that both have."""
    differing = {
        name: next(
            i for i, pair in enumerate(zip(result.token_ids, expected[name], strict=True)) if len({*pair}) > 1
        )
        for name, result in results.items()
        if name in expected and result.token_ids != expected[name]
    }
    assert not differing, f"{len(differing)} of {len(results)} requests, by first other token: {differing}"


@pytest.mark.parametrize("method_index", [0, 1])
def test_e1_drafts_do_not_change_the_tokens(target: Target, method_index: int, num_tokens: int) -> None:
    if method_index >= len(METHODS[target.name]):
        pytest.skip(f"{target.name} has one method only")
    plain = tokens_of(run(target.core(), requests(num_tokens)))
    results = run(target.core(METHODS[target.name][method_index]), requests(num_tokens))
    assert_same(results, plain)
    assert any(item.num_accepted for result in results.values() for item in result.spec)


@pytest.mark.parametrize("chunk", [None, 16, 7])
def test_e2_neighbours_and_chunks_do_not_change_the_tokens(
    target: Target, chunk: int | None, num_tokens: int
) -> None:
    """32 requests at once, among them strangers; and alone."""
    strangers = requests(num_tokens // 2, ("seeded",), seed=1, suffix=", a stranger")
    results = run(target.core(chunk=chunk), [*strangers[:12], *requests(num_tokens), *strangers[12:]])
    assert_same(results, target.alone(num_tokens))


def test_e2_with_drafts_and_without_graphs(target: Target, num_tokens: int) -> None:
    core = target.core(METHODS[target.name][-1], chunk=16, cuda_graphs="none")
    assert_same(run(core, requests(num_tokens)), target.alone(num_tokens))


def test_e3_preemptions_do_not_change_the_tokens(target: Target, num_tokens: int) -> None:
    results = run(target.core(cache={"num_blocks": 64}), requests(num_tokens))
    assert sum(result.num_preemptions for result in results.values()) > 3
    assert_same(results, target.alone(num_tokens))


@pytest.mark.parametrize("is_drafted", [False, True])
def test_e3_cached_prefixes_do_not_change_the_tokens(
    target: Target, is_drafted: bool, num_tokens: int
) -> None:
    """The same requests twice: what the first ones left is read by the second ones."""
    method = METHODS[target.name][-1] if is_drafted else None
    cache = {"enable_prefix_cache": True, "num_blocks": 4096}  # so that all of it stays there
    core = target.core(method, chunk=24, cache=cache)
    assert_same(Harness(core).run(requests(num_tokens)), target.alone(num_tokens))
    again = run(core, requests(num_tokens))
    assert sum(result.num_cached_tokens > 0 for result in again.values()) > NUM_PROMPTS
    assert_same(again, target.alone(num_tokens))
