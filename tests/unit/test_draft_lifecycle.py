"""The hooks around draft prefill and draft decode: called where launches are captured, as where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly import assemble
from engine.config import EngineConfig, SpeculatorConfig, engine_config
from engine.core import EngineCore
from engine.models.loader import load_model
from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from tests.support.cpu_graphs import use_graphs
from tests.support.engine_harness import Harness, request
from tests.support.tiny_models import make_tiny_checkpoint

HOOKS = ("before_draft_prefill", "after_draft_prefill", "before_draft_decode", "after_draft_decode")
NUM_DRAFTS = 3


def make_core(checkpoint: Path, graphs: Any) -> EngineCore:
    def build(config: EngineConfig, on_progress: Any) -> Any:
        return assemble(
            config, load_model(config.model, device=torch.device("cpu")), device=torch.device("cpu")
        )

    settings = engine_config(
        model={"model": str(checkpoint), "dtype": "float32"},
        device="cpu",
        draft_policy="first",
        cuda_graphs=graphs,
        speculators=(SpeculatorConfig(method="draft_model", model=str(checkpoint), k=NUM_DRAFTS),),
        scheduler={"max_num_seqs": 2, "max_prefill_stall": None},
        cache={"block_size": 16, "num_blocks": 64},
    )
    return EngineCore(settings, build=build)


@pytest.mark.parametrize("graphs", ["none", "full"])
def test_hooks_are_called_around_what_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    calls: list[str] = []
    shapes: list[tuple[int, ...]] = []
    for name in HOOKS:
        monkeypatch.setattr(AutoRegressiveSpeculator, name, lambda self, *args, name=name: calls.append(name))

    def after_draft_decode(self: AutoRegressiveSpeculator, drafts: torch.Tensor) -> None:
        calls.append("after_draft_decode")
        shapes.append(tuple(drafts.shape))

    monkeypatch.setattr(AutoRegressiveSpeculator, "after_draft_decode", after_draft_decode)
    if graphs == "full":
        use_graphs(monkeypatch)
    core = make_core(make_tiny_checkpoint(tmp_path, "llama", dtype="float32"), graphs)
    Harness(core).run([request("r", [5, 6, 7, 8, 9], max_tokens=12, ignore_eos=True)])

    assert {calls.count(name) > 1 for name in HOOKS} == {True}
    for before, after in zip(calls[::2], calls[1::2], strict=True):
        assert (before.removeprefix("before"), before[:7]) == (after.removeprefix("after"), "before_")
    assert {shape[1] for shape in shapes} <= set(range(1, NUM_DRAFTS + 1))
