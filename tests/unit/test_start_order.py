"""What has to be allocated before the KV cache is sized by the free memory."""

from __future__ import annotations

from typing import Any

import pytest

from engine import assembly
from engine.sampling.draft_distributions import DraftDistributions
from engine.worker.memory import choose_num_blocks
from tests.support.engine_harness import make_core, scripted_model


def test_the_ratio_test_has_its_buffers_before_the_kv_cache_takes_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = []

    class Recorded(DraftDistributions):
        def __init__(self, *arguments: Any) -> None:
            order.append("distributions")
            super().__init__(*arguments)

    def choose(*arguments: Any, **settings: Any) -> Any:
        order.append("blocks")
        return choose_num_blocks(*arguments, **settings)

    monkeypatch.setattr(assembly, "DraftDistributions", Recorded)
    monkeypatch.setattr(assembly, "choose_num_blocks", choose)
    make_core(scripted_model(), config={"verification": "ratio"})
    assert order == ["distributions", "blocks"]
