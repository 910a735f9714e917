"""An engine whose bookkeeping runs in the kernels, interpreted, gives the same tokens and accepts the same drafts."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from engine.batch import input_batch
from engine.kernels.check_drafts import check_drafts_triton
from engine.kernels.draft_history import last_token_triton, read_history_triton, record_draft_triton
from engine.kernels.draft_positions import draft_positions_triton
from engine.kernels.emit_runs import emit_runs_triton
from engine.kernels.pack_results import pack_results_triton
from engine.kernels.step_inputs import step_inputs_triton
from engine.kernels.usable_drafts import usable_drafts_triton
from engine.spec_decode import autoregressive, speculator, speculator_set
from engine.worker import model_runner
from tests.support.cpu_graphs import use_graphs
from tests.support.engine_harness import Harness, Result
from tests.support.tiny_drafters import Workshop, families_of, shared_workshop

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the engine's tensors are on the CPU")

KERNELS: tuple[tuple[ModuleType, str, object], ...] = (
    (input_batch, "step_inputs", step_inputs_triton),
    (model_runner, "emit_runs", emit_runs_triton),
    (model_runner, "pack_results", pack_results_triton),
    (speculator, "usable_drafts", usable_drafts_triton),
    (speculator_set, "check_drafts", check_drafts_triton),
    (autoregressive, "read_history", read_history_triton),
    (autoregressive, "last_token", last_token_triton),
    (autoregressive, "draft_positions", draft_positions_triton),
    (autoregressive, "record_draft", record_draft_triton),
)


def run(workshop: Workshop, method: str) -> dict[str, Result]:
    core = workshop.core([workshop.drafter(method)], depth=2, max_num_seqs=3, max_prefill_chunk=7)
    requests = workshop.requests("greedy", [(method, 3), (method, 4), (method, 1)])
    return Harness(core).run(requests[1:6])


@pytest.mark.parametrize("method", ["eagle3", "gemma4_mtp"])
def test_the_engine_does_the_same(
    method: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop = shared_workshop(tmp_path_factory, families_of(method)[0])
    expected = run(workshop, method)
    use_graphs(monkeypatch)
    for module, name, kernel in KERNELS:
        monkeypatch.setattr(module, name, kernel)
    results = run(workshop, method)
    for request_id, result in results.items():
        assert result.token_ids == expected[request_id].token_ids, request_id
        assert result.spec == expected[request_id].spec, request_id
    assert any(item.num_verifier_accepted for result in results.values() for item in result.spec)
