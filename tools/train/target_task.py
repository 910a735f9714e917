"""Trains a small Gemma 4 from nothing on prose and chats, mixed from the first step on and more and more chats; of a
chat the answers are learned.

How much of which follows from how much there is: a chat is seen at most so many times as often as a piece of prose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from tools.train.export import write_checkpoint
from tools.train.gemma4 import GemmaForTraining
from tools.train.loop import Task
from tools.train.rows import Batch, Prose, Rows
from tools.train.tokenizer import STOP_IDS

_NUM_HELD_OUT_ROWS = 64
_EVALUATION_ROWS = 16  # at once
_CHAT_WEIGHT = 1.6  # epochs of chats for one of prose
_CHAT_RAMP = 0.5  # the share of chats goes from so much below its mean to so much above


@dataclass(frozen=True, kw_only=True)
class TargetData:
    """Everything in tokens of the target's tokenizer. `sources`: for the report."""

    prose: Prose
    chats: Rows
    held_out_chats: Rows
    row_length: int
    sources: Mapping[str, Any]


class TargetTask(Task):
    """Raises ValueError where there is too little text to draw from, or to look at."""

    table_names: ClassVar = ("embed_tokens",)

    def __init__(
        self,
        raw: Mapping[str, Any],
        data: TargetData,
        *,
        rows_per_step: int,
        dropout: float,
        seed: int,
        device: torch.device,
    ) -> None:
        torch.manual_seed(seed)
        self.device = device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.module: GemmaForTraining = GemmaForTraining(raw, dtype, device, dropout)
        self._raw = raw
        self._data = data
        self._chats = data.chats
        self._held_out_prose = len(data.prose.stream) // 100  # tokens at the end
        self._num_prose_rows = (len(data.prose.stream) - self._held_out_prose) / data.row_length
        if self._num_prose_rows <= 1:
            raise ValueError(
                f"text: got {len(data.prose.stream)} tokens, expected more than a row of {data.row_length}"
            )
        if not len(data.held_out_chats) and self._held_out_prose < data.row_length:
            raise ValueError(
                f"held-out text: got answers to fewer than ten prompts and {self._held_out_prose} tokens of prose, a "
                f"hundredth, expected more answers, or {data.row_length} tokens"
            )
        self._chat_share = mean_chat_share(len(self._chats), self._num_prose_rows)
        self._rows_per_step = rows_per_step
        self._dropout = dropout
        self._seed = seed

    def loss(self, step: int, progress: float) -> torch.Tensor:
        generator = np.random.default_rng((self._seed, step))
        torch.manual_seed(
            int(generator.integers(2**62))
        )  # of what is dropped, for a run that is taken up again
        self.module.train()
        wanted = self._rows_per_step * chat_share(self._chat_share, progress)
        num_chats = int(wanted + generator.random())  # right on average
        parts = []
        if num_chats:
            parts.append(self._chats.batch(generator.integers(len(self._chats), size=num_chats), self.device))
        if num_prose := self._rows_per_step - num_chats:
            last = len(self._data.prose.stream) - self._held_out_prose - self._data.row_length
            rows = self._data.prose.rows(generator.integers(last, size=num_prose), self._data.row_length)
            parts.append(rows.batch(np.arange(num_prose), self.device))
        return self._loss_of(join(parts))

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        length = self._data.row_length
        first = len(self._data.prose.stream) - self._held_out_prose
        num_windows = min(self._held_out_prose // length, _NUM_HELD_OUT_ROWS)
        prose = self._data.prose.rows(first + length * np.arange(num_windows), length)
        self.module.eval()
        figures = {}
        for name, rows in (("prose", prose), ("chats", self._data.held_out_chats)):
            count = min(len(rows), _NUM_HELD_OUT_ROWS)
            starts = range(0, count, _EVALUATION_ROWS)
            parts = [np.arange(start, min(start + _EVALUATION_ROWS, count)) for start in starts]
            losses = [float(self._loss_of(rows.batch(part, self.device))) for part in parts]
            if losses:
                weights = [int(rows.is_learned[part].sum()) for part in parts]  # by token
                figures[f"{name}_loss"] = round(float(np.average(losses, weights=weights)), 4)
                figures[f"{name}_perplexity"] = round(math.exp(figures[f"{name}_loss"]), 2)
        return figures

    def badness(self, figures: Mapping[str, Any]) -> float:
        """It is asked in chats."""
        return float(figures["chats_loss" if "chats_loss" in figures else "prose_loss"])

    def export(self, folder: Path) -> None:
        dtype = str(self.module.model.norm.weight.dtype).removeprefix("torch.")
        generation = {
            "bos_token_id": self._raw["bos_token_id"],
            "pad_token_id": 0,
            "eos_token_id": list(STOP_IDS),
        }
        write_checkpoint(folder, {**self._raw, "dtype": dtype}, self.module.state_dict(), generation)

    def describe(self, num_steps: int) -> dict[str, Any]:
        num_rows = num_steps * self._rows_per_step
        return {
            "seed": self._seed,
            "dropout": self._dropout,
            "rows_per_step": self._rows_per_step,
            "row_length": self._data.row_length,
            "tokens_per_step": self._rows_per_step * self._data.row_length,
            "prose_tokens": len(self._data.prose.stream),
            "prose_epochs": round(num_rows * (1.0 - self._chat_share) / self._num_prose_rows, 2),
            "chat_rows": len(self._chats),
            "chat_epochs": round(num_rows * self._chat_share / max(len(self._chats), 1), 2),
            "chat_answer_tokens": self._data.chats.num_learned,
            "data": dict(self._data.sources),
        }

    def _loss_of(self, batch: Batch) -> torch.Tensor:
        labels = torch.where(batch.is_learned, batch.token_ids, -1)
        labels = batch.ahead(labels, 1).where(batch.is_same_document_ahead(1), -1).flatten()
        logits = self.module.logits(self.module(batch))
        return F.cross_entropy(logits, labels, ignore_index=-1)


def mean_chat_share(num_chat_rows: float, num_prose_rows: float) -> float:
    """Share of the rows of a run that are chats. Example: 2,400 rows of chats and 21,500 of prose -> 0.15."""
    chats = _CHAT_WEIGHT * num_chat_rows
    return chats / (chats + num_prose_rows)


def chat_share(mean: float, progress: float) -> float:
    """Share of the rows of a step that are chats: a straight line up, with this mean over the run."""
    ramp = min(_CHAT_RAMP * mean, 1.0 - mean)
    return mean + ramp * (2.0 * min(progress, 1.0) - 1.0)


def join(batches: list[Batch]) -> Batch:
    return Batch(
        token_ids=torch.cat([batch.token_ids for batch in batches]),
        positions=torch.cat([batch.positions for batch in batches]),
        is_learned=torch.cat([batch.is_learned for batch in batches]),
    )
