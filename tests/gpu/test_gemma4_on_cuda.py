"""A tiny Gemma 4 target and its MTP drafter on a GPU: mixed KV groups, the sparse head, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.assembly import assemble
from engine.config import EngineConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.models.loader import load_model
from tests.gpu.test_engine_on_cuda import SyncFreeExecutor
from tests.support.engine_harness import Harness, Result
from tests.support.tiny_drafters import MAX_MODEL_LEN, Workshop, shared_workshop

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["gemma4_ple", "gemma4_moe"])
def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory, request.param)


def run(workshop: Workshop, setting: str, k: int, **options: Any) -> dict[str, Result]:
    """float32, so that the tokens are those of float64 on the CPU; k = 0: no drafter is loaded."""
    device = torch.device("cuda")
    drafter = workshop.drafter("gemma4_mtp")
    settings = engine_config(
        model={"model": str(workshop.target_path), "dtype": "float32"},
        speculators=(SpeculatorConfig.model_validate({**drafter.model_dump(), "k": k}),) if k else (),
        draft_policy="first",
        max_model_len=MAX_MODEL_LEN,
        max_steps_in_flight=2,
        scheduler={"max_num_seqs": 16, "max_prefill_stall": None, "max_prefill_chunk": 7},
        cache={"block_size": 16, "num_blocks": 256},
        **options,
    )

    def build(config: EngineConfig, on_progress: Any) -> Any:
        loaded = load_model(config.model, device=device)
        return assemble(config, loaded, device=device, wrap_executor=SyncFreeExecutor)

    return Harness(EngineCore(settings, build=build)).run(workshop.requests(setting, [(None, None)]))


def tokens(results: dict[str, Result]) -> dict[str, list[int]]:
    return {name: result.token_ids for name, result in results.items()}


def test_greedy_tokens_are_those_of_the_cpu(workshop: Workshop) -> None:
    """In float64 there. Seeded draws are not compared: one near tie of an expert's rank in float32 is another text."""
    assert tokens(run(workshop, "greedy", 0)) == tokens(workshop.plain("greedy"))


@pytest.mark.parametrize("setting", ["greedy", "seeded", "penalties"])
def test_drafts_do_not_change_the_tokens(workshop: Workshop, setting: str) -> None:
    results = run(workshop, setting, 4)
    assert tokens(results) == tokens(run(workshop, setting, 0))
    accepted = {observation.num_accepted for result in results.values() for observation in result.spec}
    assert {0, 4} < accepted  # nothing, everything, and something between
