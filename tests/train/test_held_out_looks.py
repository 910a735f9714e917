"""A run looks at held-out text and keeps the model that was best on it, also when it was broken off in between."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training_bench import Workbench
from tools.train.budget import Limit
from tools.train.loop import LoopSettings, Task, Trainer
from tools.train.optimiser import OptimiserSettings
from tools.train.samples import Sample, SampleWriter

OVERFITTED = [5.0, 4.0, 3.0, 3.5, 4.5, 6.0]  # on held-out text, look by look


class ScriptedTask(Task):
    """Its losses on held-out text are given; a model is the number of looks that were taken when it was written."""

    table_names = ()
    described = "text"

    def __init__(self, losses: Sequence[float]) -> None:
        self.module: nn.Linear = nn.Linear(2, 2)
        self.device = torch.device("cpu")
        self.losses = losses
        self.num_looks = 0
        self.steps: list[int] = []

    def loss(self, step: int, progress: float) -> torch.Tensor:
        self.steps.append(step)
        return self.module.weight.square().sum()

    def evaluate(self) -> dict[str, Any]:
        self.num_looks += 1
        return {"loss": self.losses[self.num_looks - 1]}

    def badness(self, figures: Mapping[str, Any]) -> float:
        return float(figures["loss"])

    def export(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "model").write_text(str(self.losses[self.num_looks - 1]))

    def describe(self, num_steps: int) -> dict[str, Any]:
        return {"described": num_steps, "data": self.described}


def trainer(task: Task, folder: Path, num_looks: int = 6, steps: int = 24) -> Trainer:
    settings = LoopSettings(
        limit=Limit(steps=steps),
        optimiser=OptimiserSettings(learning_rate=0.01, table_learning_rate=0.01),
        folder=folder / "state",
        output=folder / "model",
        num_looks=num_looks,
    )
    return Trainer(task, settings)


@pytest.mark.parametrize(
    ("losses", "best", "step"), [(OVERFITTED, 3.0, 12), (sorted(OVERFITTED, reverse=True), 3.0, 24)]
)
def test_the_model_that_was_best_on_held_out_text_is_kept(
    losses: list[float], best: float, step: int, tmp_path: Path
) -> None:
    report = trainer(ScriptedTask(losses), tmp_path).run()
    assert (tmp_path / "model" / "model").read_text() == str(best)
    assert (report["held_out"], report["best_step"]) == ({"loss": best}, step)
    assert [look["step"] for look in report["looks"]] == [4, 8, 12, 16, 20, 24]
    assert [look["loss"] for look in report["looks"]] == losses


def test_a_run_that_goes_on_remembers_its_best_model(tmp_path: Path) -> None:
    trainer(ScriptedTask(OVERFITTED[:3]), tmp_path).run(stop_at=14)
    later = ScriptedTask(OVERFITTED[3:])
    report = trainer(later, tmp_path).run()
    assert later.steps[0] == 14
    assert (tmp_path / "model" / "model").read_text() == "3.0"
    assert report["best_step"] == 12
    assert report["described"] == 24


def test_of_models_that_are_equally_good_the_last_is_kept(tmp_path: Path) -> None:
    """Such as those that have learned nothing that counts yet."""
    report = trainer(ScriptedTask([1.0] * 6), tmp_path).run()
    assert report["best_step"] == 24


def test_a_run_that_is_lengthened_is_looked_at_over_all_of_it(tmp_path: Path) -> None:
    trainer(ScriptedTask(OVERFITTED), tmp_path).run()
    report = trainer(ScriptedTask([7.0, 2.0, 7.0]), tmp_path, steps=48).run()
    assert [look["step"] for look in report["looks"]] == [4, 8, 12, 16, 20, 24, 32, 40, 48]
    assert report["best_step"] == 40


def test_the_state_of_another_run_is_refused(tmp_path: Path) -> None:
    """Its weights may be of other tokens: which ones an EAGLE-3 head drafts follows from the text."""
    trainer(ScriptedTask(OVERFITTED), tmp_path).run(stop_at=2)
    other = ScriptedTask(OVERFITTED)
    other.described = "other text"
    with pytest.raises(ValueError, match="of a run with other data"):
        trainer(other, tmp_path)
    other.described, other.module = ScriptedTask.described, nn.Linear(3, 2)
    with pytest.raises(ValueError, match="of a run with other num_parameters"):
        trainer(other, tmp_path)


def test_a_target_that_learns_its_chats_by_heart_is_not_the_one_that_is_kept(tmp_path: Path) -> None:
    """Answers without sense can only be learned by heart: held out, they get likelier first and then less likely."""
    bench = Workbench(tmp_path)
    generator = random.Random(0)
    writer = SampleWriter(tmp_path / "nonsense", "fake")
    for number in range(40):
        words = " ".join(generator.choice(("sea", "fox", "hill", "wood", "owl", "bee")) for _ in range(24))
        writer.add(
            Sample(
                kind="story",
                prompt=f"Tell me {number}",
                answer=words,
                prompt_ids=[1],
                answer_ids=[2],
                temperature=0.8,
                finish="stop",
            )
        )
    writer.flush()
    bench.samples = tmp_path / "nonsense"
    bench.text.write_text(bench.text.read_text()[:2000])
    hasty = ("--learning-rate", 0.02, "--table-learning-rate", 0.01, "--dropout", 0.0, "--rows", 4)
    report = bench.train_target("target", 120, *hasty)
    losses = [look["chats_loss"] for look in report["looks"]]
    assert report["best_step"] < report["steps"]
    assert report["held_out"]["chats_loss"] == min(losses) < losses[-1]
    assert report["chat_epochs"] > 3
    assert json.loads((tmp_path / "target" / "config.json").read_text())["model_type"] == "gemma4_text"
