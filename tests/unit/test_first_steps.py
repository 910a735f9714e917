"""Steps that are nobody's, before the first request: they run, and leave nothing that a request would see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly import assemble
from engine.config import ModelConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.messages import ModelInfo
from engine.models.loader import LoadedModel, load_model
from engine.worker import first_steps
from engine.worker.model_runner import ModelRunner
from tests.support.engine_harness import Harness, request
from tests.support.tiny_models import make_tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(ModelConfig(model=str(checkpoint)), device=CPU)


@pytest.mark.parametrize("method", ["none", "draft_model", "ngram"])
def test_requests_get_the_same_after_them(
    method: str, loaded: LoadedModel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(checkpoint) if method == "draft_model" else None
    speculators = () if method == "none" else (SpeculatorConfig(method=method, model=path, k=2),)
    config = engine_config(
        model={"model": "test"},
        device="cpu",
        max_model_len=64,
        speculators=speculators,
        scheduler={"max_num_seqs": 32, "check_invariants": True},
        cache={"block_size": 4, "num_blocks": 256},
    )
    requests = [
        request(f"r{index}", prompt, max_tokens=9, ignore_eos=True, temperature=temperature, seed=3)
        for index, (prompt, temperature) in enumerate([([5, 6, 7] * 4, 0.0), ([9] * 3, 0.7), ([8], 0.0)])
    ]

    def serve() -> dict[str, Any]:
        core = EngineCore(config, build=lambda c, _: assemble(c, loaded, device=CPU))
        return {name: result.token_ids for name, result in Harness(core).run(requests).items()}

    plain = serve()
    num_run = run_first_steps(monkeypatch)
    assert serve() == plain
    assert num_run() == (4 if method == "none" else 7)


def run_first_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """From now on, as if there were a device; how many were."""
    results = []

    def run_them(runner: ModelRunner, methods: Any, info: ModelInfo) -> None:
        for plan in first_steps.first_steps(methods, info):
            output = runner.launch_verify(runner.launch_target(plan)).result()
            results.append(output)
            assert len(output.rows[0].token_ids) == 1
            assert not output.rows[0].drafter_error

    monkeypatch.setattr("engine.assembly.prepare_first_steps", run_them)
    return lambda: len(results)
