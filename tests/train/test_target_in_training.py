"""A target in training computes what the engine, and transformers, make of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.models.loader import load_model
from tests.support.training_bench import tiny_config
from tools.train.attention import run_target
from tools.train.export import write_checkpoint
from tools.train.gemma4 import GemmaForTraining
from tools.train.rows import Batch, Document, pack_documents

CPU = torch.device("cpu")


@pytest.fixture
def batch() -> Batch:
    """Rows of several documents, longer than the window together and alone, and padded."""
    generator = np.random.default_rng(0)
    documents = [
        Document(generator.integers(3, 300, size=size).tolist()) for size in (40, 9, 5, 60, 30, 1, 2)
    ]
    rows = pack_documents(documents, 64, seed=0)
    return rows.batch(np.arange(len(rows)), CPU)


def make_module(dtype: torch.dtype) -> GemmaForTraining:
    torch.manual_seed(0)
    module = GemmaForTraining(tiny_config(), dtype, CPU)
    with torch.no_grad():
        for parameter in module.parameters():  # nothing that a model could leave out unseen
            parameter.mul_(1.0 + 0.3 * torch.rand_like(parameter)).mul_(3.0 if parameter.ndim > 1 else 1.0)
    return module


def test_the_engine_computes_what_was_trained(batch: Batch, tmp_path: Path) -> None:
    module = make_module(torch.float64)
    write_checkpoint(tmp_path, {**tiny_config(), "dtype": "float64"}, module.state_dict())
    model = load_model(ModelConfig(model=str(tmp_path)), device=CPU).model
    with torch.no_grad():
        hidden = module(batch)
        assert (run_target(model, batch).hidden - hidden).abs().max() < 1e-10
        assert (model.compute_logits(hidden) - module.logits(hidden)).abs().max() < 1e-10


def test_transformers_computes_what_was_trained(batch: Batch, tmp_path: Path) -> None:
    module = make_module(torch.float32)
    write_checkpoint(tmp_path, {**tiny_config(), "dtype": "float32"}, module.state_dict())
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    with torch.no_grad():
        logits = module.logits(module(batch)).view(*batch.token_ids.shape, -1)
        for row in range(len(batch.token_ids)):
            length = int((batch.positions[row] == torch.arange(64)).sum())  # the first document
            expected = reference(batch.token_ids[row : row + 1, :length]).logits[0]
            assert (logits[row, :length] - expected).abs().max() < 1e-3


def test_a_target_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(CheckpointError, match="a dense one"):
        GemmaForTraining({**tiny_config(), "attention_k_eq_v": True}, torch.float32, CPU)
