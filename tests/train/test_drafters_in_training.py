"""What a drafter computes while it is trained is what the engine computes with it: row by row, draft by draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from tools.train.rows import Batch, Document, pack_documents

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


@dataclass
class Head:
    """A head with random weights that were made larger. `batch`: what it was calibrated on."""

    raw: dict[str, Any]
    module: Eagle3ForTraining
    batch: Batch

    def logits(self) -> torch.Tensor:
        """[K, num_tokens, draft_vocab_size]"""
        with torch.no_grad():
            return torch.stack(self.module.draft_logits(self.batch, K)[0])


def make_head(
    workshop: Workshop,
    *,
    shares_target_head: bool = False,
    seed: int = 0,
    num_ids: int = 100,
    intermediate_size: int = 40,
) -> Head:
    target = workshop.loaded.model
    raw = head_config(
        workshop.loaded.raw_config,
        intermediate_size=intermediate_size,
        draft_vocab_size=num_ids,
        aux_layers=[0, 1, 1],
        dtype="float64",
        shares_target_head=shares_target_head,
    )
    torch.manual_seed(seed)
    target_ids = torch.randperm(target.vocab_size)[:num_ids].sort().values
    module = Eagle3ForTraining(raw, target, target_ids, torch.float64, CPU)
    for parameter in module.parameters():
        parameter.data.mul_(3.0)
    rows = pack_documents([Document(prompt) for prompt in workshop.prompts], 40, seed=seed)
    batch = rows.batch(np.arange(len(rows)), CPU)
    module.calibrate(batch)
    return Head(raw, module, batch)


@pytest.mark.parametrize("shares_target_head", [False, True])
def test_a_head_drafts_in_the_engine_what_it_learned_to(
    shares_target_head: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workshop = shared_workshop(tmp_path_factory)
    head = make_head(workshop, shares_target_head=shares_target_head)
    weights = head.module.checkpoint()
    assert ("lm_head.weight" not in weights) == shares_target_head
    write_checkpoint(tmp_path, head.raw, weights)
    rounds = run_engine(workshop, SpeculatorConfig(method="eagle3", model=str(tmp_path), k=K), "eagle3")
    check_rounds(rounds, head.module, head.module.target_ids)


@pytest.mark.parametrize("shares_target_head", [False, True])
def test_a_head_that_begins_with_another_drafts_as_it_does(
    shares_target_head: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workshop = shared_workshop(tmp_path_factory)
    other = make_head(workshop, shares_target_head=shares_target_head)
    every = workshop.loaded.model.vocab_size
    head = make_head(workshop, shares_target_head=shares_target_head, seed=1, num_ids=every)
    head.batch = other.batch
    assert (head.logits()[..., other.module.target_ids] - other.logits()).abs().max() > 0.1
    head.module.begin_with(other.module.checkpoint())
    assert (head.logits()[..., other.module.target_ids] - other.logits()).abs().max() < TOLERANCE


def test_a_head_that_drafts_all_tokens_needs_no_map_to_begin_with(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    workshop = shared_workshop(tmp_path_factory)
    other = make_head(workshop, num_ids=workshop.loaded.model.vocab_size)
    given = other.module.checkpoint()
    del given["d2t"], given["t2d"]
    head = make_head(workshop, seed=1)
    head.batch = other.batch
    head.module.begin_with(given)
    assert (head.logits() - other.logits()[..., head.module.target_ids]).abs().max() < TOLERANCE


def test_a_head_of_other_sizes_is_nothing_to_begin_with(tmp_path_factory: pytest.TempPathFactory) -> None:
    workshop = shared_workshop(tmp_path_factory)
    other = make_head(workshop, intermediate_size=24).module.checkpoint()
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight: got \[24, 32\], expected \[40, 32\]"):
        make_head(workshop).module.begin_with(other)
    del other["fc.weight"]
    with pytest.raises(ValueError, match=r"fc\.weight: got nothing, expected \[32, 96\]"):
        make_head(workshop).module.begin_with(other)
