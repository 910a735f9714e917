"""The head in models/ drafts as its golden figures say.

The figures stand beside it, as `python -m tools.train evaluate` wrote them on a CPU in float32: same prompts, same
sampling, so that what moves them is rounding, or a fault. Prompts of this kind were held out of training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.smollm2 import smollm2_gguf
from tools.train import evaluate

HEAD = Path(__file__).parent.parent.parent / "models" / "smollm2-eagle3"
GOLDEN_FILE = HEAD / "golden.json"
BAND = 0.05


def test_the_head_accepts_as_its_golden_figures_say(tmp_path: Path) -> None:
    golden: dict[str, Any] = json.loads(GOLDEN_FILE.read_text())
    output = tmp_path / "found.json"
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    model = ["--target", str(smollm2_gguf()), "--speculator", f"eagle3,model={HEAD}", "--output", str(output)]
    sizes = [f"--{name.replace('_', '-')}={golden[name]}" for name in ("num_prompts", "k", "max_tokens")]
    place = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--max-model-len", "512"]
    evaluate.run(parser.parse_args([*model, *sizes, *place, "--held-out", "--batch-sizes"]))
    found = json.loads(output.read_text())["acceptance"]
    assert found.keys() == golden["acceptance"].keys()
    for case, figures in golden["acceptance"].items():
        rates = found[case]["acceptance_by_position"]
        assert rates == pytest.approx(figures["acceptance_by_position"], abs=BAND), case
