"""What a drafter computes while it is trained is what the engine computes with it: row by row, draft by draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import SpeculatorConfig
from engine.spec_decode.gemma4 import POSITION_POLICIES
from tests.support.draft_rounds import Round, record_rounds
from tests.support.engine_harness import Harness
from tests.support.gemma4_rounds import record_assistant_rounds
from tests.support.tiny_drafters import Workshop, shared_workshop
from tools.train.eagle3 import Eagle3ForTraining, head_config
from tools.train.export import write_checkpoint
from tools.train.gemma4_assistant import AssistantForTraining, assistant_config
from tools.train.rows import Document, pack_documents

K = 4
CPU = torch.device("cpu")
TOLERANCE = 1e-8  # float64


def run_engine(workshop: Workshop, config: SpeculatorConfig, method: str) -> list[Round]:
    """Greedy answers with drafts; what was drafted."""
    speculator = workshop.draft_model(config)
    record = record_assistant_rounds if method == "gemma4_mtp" else record_rounds
    rounds = record(speculator)
    core = workshop.core([config], speculators={method: speculator})
    Harness(core).run(workshop.requests("greedy", [(None, None)]))
    return rounds


def check_rounds(
    rounds: Sequence[Round], module: AssistantForTraining | Eagle3ForTraining, columns: torch.Tensor
) -> None:
    """columns: [draft_vocab_size] int64, which tokens the module's logits are of. Each text shares its row."""
    for item in rounds:
        token_ids = [*item.confirmed, *item.drafts, 0]
        packed = pack_documents([Document([5, 6, 7]), Document(token_ids)], len(token_ids) + 3, seed=1)
        batch = packed.batch(np.arange(1), CPU)
        row_ids = batch.token_ids[0].tolist()
        start = next(at for at in (0, 3) if row_ids[at : at + len(token_ids)] == token_ids)
        with torch.no_grad():
            steps, _ = module.draft_logits(batch, len(item.drafts))
        row = start + len(item.confirmed) - 2
        for logits, got in zip(steps, item.logits, strict=True):
            assert (logits[row] - got[columns]).abs().max() < TOLERANCE, item


@pytest.mark.parametrize("policy", POSITION_POLICIES)
@pytest.mark.parametrize("family", ["gemma4_ple", "gemma4_moe"])
def test_an_assistant_drafts_in_the_engine_what_it_learned_to(
    family: str, policy: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workshop = shared_workshop(tmp_path_factory, family)
    raw = assistant_config(
        workshop.loaded.raw_config,
        hidden_size=24,
        intermediate_size=40,
        layer_types=["sliding_attention", "full_attention"],
        dtype="float64",
    )
    torch.manual_seed(0)
    module = AssistantForTraining(raw, workshop.loaded.model, POSITION_POLICIES[policy], torch.float64, CPU)
    for parameter in module.parameters():
        parameter.data.mul_(3.0)
    write_checkpoint(tmp_path, raw, module.state_dict())
    config = SpeculatorConfig(method="gemma4_mtp", model=str(tmp_path), k=K, options={"positions": policy})
    rounds = run_engine(workshop, config, "gemma4_mtp")
    check_rounds(rounds, module, torch.arange(workshop.loaded.model.vocab_size))


def test_a_head_drafts_in_the_engine_what_it_learned_to(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workshop = shared_workshop(tmp_path_factory)
    target = workshop.loaded.model
    raw = head_config(
        workshop.loaded.raw_config,
        intermediate_size=40,
        draft_vocab_size=100,
        aux_layers=[0, 1, 1],
        dtype="float64",
    )
    torch.manual_seed(0)
    target_ids = torch.randperm(target.vocab_size)[:100].sort().values
    module = Eagle3ForTraining(raw, target, target_ids, torch.float64, CPU)
    for parameter in module.parameters():
        parameter.data.mul_(3.0)
    rows = pack_documents([Document(prompt) for prompt in workshop.prompts], 40, seed=0)
    module.calibrate(rows.batch(np.arange(len(rows)), CPU))
    write_checkpoint(tmp_path, raw, module.checkpoint())
    rounds = run_engine(workshop, SpeculatorConfig(method="eagle3", model=str(tmp_path), k=K), "eagle3")
    check_rounds(rounds, module, target_ids)
