"""What a start and the first requests launch was compiled before, together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton

from engine.config import SpeculatorConfig
from tests.support.cuda_engine import make_cuda_core
from tests.support.engine_harness import Harness, request
from tests.support.tiny_models import make_tiny_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("method", "hidden_size"), [(None, 112), ("draft_model", 144)])
def test_first_requests_compile_nothing(
    method: str | None, hidden_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sizes that no other test has, so that kernels of this process are of no use."""
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size + 32,
        "vocab_size": hidden_size + 256,
    }
    path = str(make_tiny_checkpoint(tmp_path / "model", "llama", dtype="float32", **sizes))
    is_ahead: list[bool] = []

    def note(*, is_manual_warmup: bool, **_: Any) -> None:
        is_ahead.append(is_manual_warmup)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    core = make_cuda_core(
        model={"model": path, "dtype": "bfloat16"},
        speculators=() if method is None else (SpeculatorConfig(method=method, model=path, k=3),),
    )
    assert sum(is_ahead) >= 15
    assert is_ahead.count(False) <= 2, "the head is tried when logits are first computed"
    is_ahead.clear()
    for index, temperature in enumerate((0.0, 1.0)):
        prompt = [(index + 3 * token) % 200 for token in range(90)]
        Harness(core).run(
            [request(f"r{index}", prompt, max_tokens=8, temperature=temperature, ignore_eos=True)]
        )
    assert not is_ahead
    core.close()
