"""Trains drafters on what their frozen target wrote: an MTP assistant, an EAGLE-3 head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from engine.models.loader import LoadedModel
from engine.spec_decode.gemma4 import POSITION_POLICIES
from tools.train.draft_loss import chain_counts, draft_loss
from tools.train.eagle3 import Eagle3ForTraining, head_config
from tools.train.export import write_checkpoint
from tools.train.gemma4_assistant import AssistantForTraining, assistant_config
from tools.train.loop import Task
from tools.train.rows import Batch, Rows

_NUM_HELD_OUT_ROWS = 32


class DraftTask(Task):
    """`greedy`: rows of greedy text, held out, on which chains of drafts are measured. Raises ValueError for rows that
    another model wrote."""

    def __init__(
        self,
        target: LoadedModel,
        rows: Rows,
        greedy: Rows,
        *,
        num_steps: int,
        rows_per_step: int,
        seed: int,
        device: torch.device,
        sources: Mapping[str, Any],
    ) -> None:
        highest = max(int(part.token_ids.max()) for part in (rows, greedy))
        if highest >= target.model.vocab_size:
            raise ValueError(
                f"samples: got the token {highest}, expected some of the target's {target.model.vocab_size}: another "
                "model wrote them"
            )
        torch.manual_seed(seed)
        self.device = device
        self._target = target
        self._rows = rows
        self._greedy = greedy
        self._num_steps = num_steps
        self._rows_per_step = rows_per_step
        self._seed = seed
        self._sources = sources

    @property
    def dtype_name(self) -> str:
        return str(self._target.dtype).removeprefix("torch.")

    @abstractmethod
    def draft_logits(self, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor]:
        """By step, [num_tokens, draft vocabulary]; and the target's hidden states."""

    @abstractmethod
    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, draft vocabulary]"""

    @abstractmethod
    def target_choices(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's most likely token as an index of the draft vocabulary, -1 where it is not in it: [num_tokens]
        int64."""

    def usable(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[num_tokens] bool: is the target's most likely token in the draft vocabulary? None: all are."""
        return None

    def loss(self, step: int, progress: float) -> torch.Tensor:
        indices = np.random.default_rng((self._seed, step)).integers(
            len(self._rows), size=self._rows_per_step
        )
        batch = self._rows.batch(indices, self.device)
        drafts, hidden = self.draft_logits(batch)
        with torch.no_grad():
            wanted, usable = self.target_logits(hidden), self.usable(hidden)
            if usable is not None:
                usable = usable.view(batch.token_ids.shape)
        return draft_loss(batch, drafts, wanted, usable)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        accepted = counts = torch.zeros(self._num_steps, dtype=torch.int64, device=self.device)
        for index in range(min(len(self._greedy), _NUM_HELD_OUT_ROWS)):
            batch = self._greedy.batch(np.array([index]), self.device)
            drafts, hidden = self.draft_logits(batch)
            found = chain_counts(batch, [logits.argmax(-1) for logits in drafts], self.target_choices(hidden))
            accepted, counts = accepted + found[0], counts + found[1]
        shares = (accepted / counts.clamp(min=1)).tolist()
        return {
            "greedy_chain_by_position": [round(share, 4) for share in shares],
            "greedy_acceptance_length": round(1.0 + sum(shares), 4),
            "positions": int(counts[0]),
        }

    def badness(self, figures: Mapping[str, Any]) -> float:
        return -float(figures["greedy_acceptance_length"])

    def describe(self, num_steps: int) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "num_steps": self._num_steps,
            "rows_per_step": self._rows_per_step,
            "row_length": self._rows.token_ids.shape[1],
            "rows": len(self._rows),
            "epochs": round(num_steps * self._rows_per_step / len(self._rows), 2),
            "answer_tokens": self._rows.num_learned,
            "data": dict(self._sources),
        }


class AssistantTask(DraftTask):
    """`policy`: a name of POSITION_POLICIES."""

    table_names: ClassVar = ("embed_tokens",)

    def __init__(
        self,
        target: LoadedModel,
        rows: Rows,
        greedy: Rows,
        *,
        shape: Mapping[str, Any],
        policy: str,
        **options: Any,
    ) -> None:
        if not target.model.shareable_kv():
            raise ValueError("the target: got one that shares no keys and values, expected a Gemma 4")
        super().__init__(target, rows, greedy, **options)
        self._policy = policy
        self._raw = assistant_config(target.raw_config, dtype=self.dtype_name, **shape)
        self._module = AssistantForTraining(
            self._raw, target.model, POSITION_POLICIES[policy], target.dtype, self.device
        )
        self.module: nn.Module = self._module

    def draft_logits(self, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor]:
        return self._module.draft_logits(batch, self._num_steps)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._target.model.compute_logits(hidden)

    def target_choices(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target_logits(hidden).argmax(-1)

    def export(self, folder: Path) -> None:
        generation = {"num_assistant_tokens": self._num_steps, "num_assistant_tokens_schedule": "constant"}
        write_checkpoint(folder, self._raw, self._module.state_dict(), generation)

    def describe(self, num_steps: int) -> dict[str, Any]:
        return {"policy": self._policy, **super().describe(num_steps)}


class Eagle3Task(DraftTask):
    """The draft vocabulary is what the rows' answers use most. `init`: folder of a head to begin with."""

    table_names: ClassVar = ("lm_head",)

    def __init__(
        self,
        target: LoadedModel,
        rows: Rows,
        greedy: Rows,
        *,
        shape: Mapping[str, Any],
        init: Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(target, rows, greedy, **options)
        model = target.model
        num_layers = model.num_layers
        aux_layers = (2, num_layers // 2, num_layers - 3)
        self._raw = head_config(target.raw_config, aux_layers=aux_layers, dtype=self.dtype_name, **shape)
        counts = np.bincount(rows.token_ids[rows.is_learned], minlength=model.vocab_size)
        chosen = np.sort(np.argsort(-counts, kind="stable")[: shape["draft_vocab_size"]])
        self._coverage = float(counts[chosen].sum() / max(counts.sum(), 1))
        target_ids = torch.from_numpy(chosen.astype(np.int64))
        self._module = Eagle3ForTraining(self._raw, model, target_ids, target.dtype, self.device)
        self.module: nn.Module = self._module
        self._module.calibrate(rows.batch(np.arange(min(len(rows), self._rows_per_step)), self.device))
        self._init = init
        if init is not None:
            self._module.begin_with(load_file(init / "model.safetensors"))
        draft_ids = torch.full((model.vocab_size,), -1, dtype=torch.int64)
        draft_ids[target_ids] = torch.arange(len(target_ids))
        self._draft_ids = draft_ids.to(self.device)  # [vocab_size], by target id

    def draft_logits(self, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor]:
        return self._module.draft_logits(batch, self._num_steps)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._module.target_logits(hidden)

    def usable(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target_choices(hidden) >= 0

    def target_choices(self, hidden: torch.Tensor) -> torch.Tensor:
        """By parts: the logits of a large vocabulary are wide."""
        parts = [self._target.model.compute_logits(part).argmax(-1) for part in torch.split(hidden, 4096)]
        return self._draft_ids[torch.cat(parts)]

    def export(self, folder: Path) -> None:
        write_checkpoint(folder, self._raw, self._module.checkpoint())

    def describe(self, num_steps: int) -> dict[str, Any]:
        began = {} if self._init is None else {"began_with": self._init.name}
        return {"draft_vocab_coverage": round(self._coverage, 4), **began, **super().describe(num_steps)}
