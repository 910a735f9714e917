"""The training loop: any task, one optimiser, state on disk from which a run goes on as if nothing had been.

A task says what a step learns from, what is measured on held-out text, and how the model is written. The order of
data depends on the seed and the number of the step alone. What is kept is the model that was best on held-out text,
looked at several times over a run: text that is repeated too often is learned by heart, and only that shows it.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tools.train.attention import fused_attention
from tools.train.budget import Budget, Limit, learning_rate_scale
from tools.train.export import write_json
from tools.train.optimiser import Optimiser, OptimiserSettings

STATE_FILE = "state.pt"
REPORT_FILE = "report.json"


class Task(ABC):
    """What is trained."""

    table_names: ClassVar[Sequence[str]]
    """Parts of the names of matrices that are tables (embeddings, heads), for the optimiser."""
    module: nn.Module
    device: torch.device

    @abstractmethod
    def loss(self, step: int, progress: float) -> torch.Tensor:
        """Of one batch; a scalar with a gradient."""

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Figures on held-out text."""

    @abstractmethod
    def badness(self, figures: Mapping[str, Any]) -> float:
        """Of what `evaluate` found: the lower, the better."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the model as it is now."""

    @abstractmethod
    def describe(self, num_steps: int) -> dict[str, Any]:
        """Data, how often it was seen in so many steps, sizes and seed, for the report."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """At held-out text, after step `step`."""

    step: int
    badness: float
    figures: Mapping[str, Any]

    def as_entry(self) -> dict[str, Any]:
        return {"step": self.step, **self.figures}


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """`folder` takes the state, `output` the model and the report."""

    limit: Limit
    optimiser: OptimiserSettings
    folder: Path
    output: Path
    num_looks: int = 12  # at held-out text, evenly over the run
    save_seconds: float = 60.0
    say_seconds: float = 10.0


class Trainer:
    def __init__(self, task: Task, settings: LoopSettings) -> None:
        self._task = task
        self._settings = settings
        self._optimiser = Optimiser(task.module, settings.optimiser, task.table_names)
        self._step = 0
        self._history: list[dict[str, float]] = []
        self._looks: list[Look] = []
        self._run = {
            "task": type(task).__name__,
            "num_parameters": sum(parameter.numel() for parameter in task.module.parameters()),
            **task.describe(0),
        }
        used_seconds = self._resume()
        self._budget = Budget(settings.limit, used_seconds)
        # Of those that are due: fewer than there were, where the limit has grown since.
        self._num_looked = min(len(self._looks), int(self._due_looks()))

    @property
    def step(self) -> int:
        return self._step

    def run(self, stop_at: int | None = None) -> dict[str, Any]:
        """To the end of the limit, or up to step `stop_at` (to go on later). Returns the report."""
        settings = self._settings
        saved_at = said_at = time.monotonic()
        said_step = self._step
        with fused_attention(self._task.device):
            while (progress := self._budget.progress(self._step)) < 1.0 and self._step != stop_at:
                if (due := int(self._due_looks())) > self._num_looked:
                    self._look()
                    self._num_looked = due
                loss = self._task.loss(self._step, progress)
                loss.backward()  # type: ignore[no-untyped-call]
                norm = self._optimiser.step(learning_rate_scale(progress))
                self._step += 1
                now = time.monotonic()
                if now >= said_at + settings.say_seconds or self._step == 1:
                    rate = (self._step - said_step) / (now - said_at)
                    self._say(loss, norm, rate)
                    said_at, said_step = now, self._step
                if now >= saved_at + settings.save_seconds:
                    self._save()
                    saved_at = time.monotonic()
            if progress >= 1.0:
                self._look()
            self._save()
            return self._report()

    def _due_looks(self) -> float:
        return self._budget.progress(self._step) * self._settings.num_looks

    def _say(self, loss: torch.Tensor, norm: torch.Tensor, rate: float) -> None:
        entry = {
            "step": self._step,
            "seconds": round(self._budget.used_seconds, 1),
            "loss": round(float(loss.detach()), 4),  # sync: now and then
            "grad_norm": round(float(norm), 4),
        }
        self._history.append(entry)
        print(f"{type(self._task).__name__} {json.dumps(entry)} {rate:.2f} steps/s", flush=True)

    def _look(self) -> None:
        """Measure on held-out text, and write the model if none was better."""
        if self._looks and self._looks[-1].step == self._step:
            return
        with torch.no_grad():
            figures = self._task.evaluate()
        look = Look(step=self._step, badness=self._task.badness(figures), figures=figures)
        self._looks.append(look)
        print(f"{type(self._task).__name__} held out {json.dumps(look.as_entry())}", flush=True)
        if self._best() is look:
            self._task.export(self._settings.output)

    def _best(self) -> Look:
        """Of equals the last, which has learned most."""
        return min(reversed(self._looks), key=lambda look: look.badness)

    def _save(self) -> None:
        folder = self._settings.folder
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "run": self._run,
            "step": self._step,
            "used_seconds": self._budget.used_seconds,
            "history": self._history,
            "looks": [asdict(look) for look in self._looks],
            "optimiser": self._optimiser.state_dict(),
        }
        partial = folder / f"{STATE_FILE}.partial"
        torch.save(state, partial)
        partial.rename(folder / STATE_FILE)

    def _resume(self) -> float:
        """Take up what the folder holds. Returns the seconds used so far. Raises ValueError for the state of another
        run: weights mean nothing to other data, which other tokens can be drafted from, or to another shape.
        """
        path = self._settings.folder / STATE_FILE
        if not path.exists():
            return 0.0
        state = torch.load(path, map_location=self._task.device, weights_only=True)
        kept = state.get("run", {})
        if kept != self._run:
            keys = [key for key in {**kept, **self._run} if kept.get(key) != self._run.get(key)]
            raise ValueError(
                f"{path}: got the state of a run with other {', '.join(keys)}, expected one with the same; go on with "
                "what it was, or give another folder"
            )
        self._step, self._history = state["step"], state["history"]
        self._looks = [Look(**entry) for entry in state["looks"]]
        self._optimiser.load_state_dict(state["optimiser"])
        print(f"{path}: going on from step {self._step}", flush=True)
        used: float = state["used_seconds"]
        return used

    def _report(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "torch": torch.__version__,
            "device": device_name(self._task.device),
            "steps": self._step,
            "seconds": round(self._budget.used_seconds, 1),
            "optimiser": asdict(self._settings.optimiser),
            **self._run,
            **self._task.describe(self._step),
            "history": self._history,
            "looks": [look.as_entry() for look in self._looks],
        }
        if self._looks:
            best = self._best()
            report |= {"best_step": best.step, "held_out": dict(best.figures)}
        write_report(self._settings.output, report)
        return report


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / REPORT_FILE, report)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
