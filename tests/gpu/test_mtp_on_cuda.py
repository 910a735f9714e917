"""Tiny targets with an MTP layer on a GPU: the latent cache, experts and drafts by the kernels, with graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.assembly import assemble
from engine.attention import latent
from engine.config import EngineConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.models.loader import load_model
from tests.gpu.test_engine_on_cuda import SyncFreeExecutor
from tests.support.engine_harness import Harness, Result
from tests.support.tiny_drafters import MAX_MODEL_LEN, Workshop, families_of, shared_workshop

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=families_of("mtp"))
def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory, request.param)


def run(workshop: Workshop, setting: str, k: int) -> dict[str, Result]:
    """float32, so that the tokens are those of float64 on the CPU; k = 0: no drafter is loaded."""
    device = torch.device("cuda")
    workshop.drafter("mtp")
    settings = engine_config(
        model={"model": str(workshop.target_path), "dtype": "float32"},
        speculators=(SpeculatorConfig(method="mtp", k=k),) if k else (),
        draft_policy="first",
        max_model_len=MAX_MODEL_LEN,
        max_steps_in_flight=2,
        scheduler={"max_num_seqs": 16, "max_prefill_stall": None, "max_prefill_chunk": 7},
        cache={"block_size": 16, "num_blocks": 256},
    )

    def build(config: EngineConfig, on_progress: Any) -> Any:
        loaded = load_model(config.model, device=device)
        return assemble(config, loaded, device=device, wrap_executor=SyncFreeExecutor)

    return Harness(EngineCore(settings, build=build)).run(workshop.requests(setting, [(None, None)]))


def tokens(results: dict[str, Result]) -> dict[str, list[int]]:
    return {name: result.token_ids for name, result in results.items()}


@pytest.mark.parametrize("min_expanded", [4, 1000], ids=["expanded", "absorbed"])
def test_greedy_tokens_are_those_of_the_cpu(
    workshop: Workshop, min_expanded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 there. Seeded draws are not compared: one near tie of an expert's rank in float32 is another text."""
    monkeypatch.setattr(latent, "MIN_EXPANDED_QUERY_LEN", min_expanded)
    assert tokens(run(workshop, "greedy", 0)) == tokens(workshop.plain("greedy"))


@pytest.mark.parametrize("setting", ["greedy", "seeded", "penalties"])
@pytest.mark.parametrize("k", [1, 3])
def test_drafts_do_not_change_the_tokens(workshop: Workshop, setting: str, k: int) -> None:
    results = run(workshop, setting, k)
    assert tokens(results) == tokens(run(workshop, setting, 0))
    accepted = {observation.num_accepted for result in results.values() for observation in result.spec}
    assert {0, k} <= accepted
