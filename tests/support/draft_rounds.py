"""Watches a draft model at work: every round of every request, with the logits that its drafts were drawn from, and
the same logits by definition, from the whole sequence at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from engine.spec_decode.speculator import ProposalInputs
from tests.support.tiny_drafters import Workshop
from tests.support.tiny_heads import TinyTarget

TOLERANCE = 1e-8  # float64


@dataclass
class Round:
    """One proposal for one request."""

    confirmed: tuple[int, ...]  # prompt and emitted tokens that the drafts follow
    drafts: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list, repr=False)  # [vocab_size] of each draft


class RoundRecorder:
    """Gathers rounds. Left out are drafts that a request cannot use: beyond its own k, or at its token limit, where
    nothing is stored."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self._open: dict[int, Round] = {}  # by request row

    def record(
        self, logits: torch.Tensor, drafts: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor
    ) -> None:
        """logits: [num_reqs, vocab_size]; drafts, positions: [num_reqs] int64."""
        wanted = inputs.num_speculative_tokens
        rows = inputs.request_rows
        for index, row in enumerate(inputs.row_list):
            num_tokens = int(rows.num_tokens[row])
            step = int(positions[index]) - num_tokens
            if step >= int(wanted[index]) or int(positions[index]) >= int(rows.token_limit[row]):
                continue
            if step == 0:
                self._open[row] = Round(tuple(rows.token_history[row, :num_tokens].tolist()))
                self.rounds.append(self._open[row])
            self._open[row].drafts.append(int(drafts[index]))
            self._open[row].logits.append(logits[index].clone())


def record_rounds(speculator: AutoRegressiveSpeculator) -> list[Round]:
    """From now on every round is appended to the list."""
    recorder = RoundRecorder()
    sampler: Any = speculator._sampler  # type: ignore[attr-defined]
    inner, inner_among = sampler.draw, sampler.draw_among

    def draw(logits: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor) -> torch.Tensor:
        drafts: torch.Tensor = inner(logits, inputs, positions)
        recorder.record(logits, drafts, inputs, positions)
        return drafts

    def draw_among(
        logits: torch.Tensor, token_ids: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor
    ) -> torch.Tensor:
        sampler.draw = inner  # which it may call
        drafts: torch.Tensor = inner_among(logits, token_ids, inputs, positions)
        sampler.draw = draw
        spread = logits.new_full((len(logits), inputs.states.vocab_size), float("-inf"))
        recorder.record(spread.scatter_(1, token_ids, logits), drafts, inputs, positions)
        return drafts

    sampler.draw, sampler.draw_among = draw, draw_among
    return recorder.rounds


class RoundChecker:
    """Compares rounds with the definition."""

    def __init__(self, workshop: Workshop, method: str) -> None:
        self._workshop = workshop
        config = workshop.drafter(method)
        self._reference = workshop.references.get(method)
        if self._reference is None:
            assert config.model is not None
            self._model = TinyTarget(workshop.folder / method)

    def check(self, rounds: list[Round]) -> None:
        """Raises AssertionError for the first round whose logits are others."""
        assert rounds, "nothing was drafted"
        for item in rounds:
            expected = self.expected(item)
            for step, (got, wanted) in enumerate(zip(item.logits, expected, strict=True)):
                is_close = torch.isclose(got, wanted, rtol=0.0, atol=TOLERANCE)  # -inf equals -inf
                assert is_close.all(), (
                    f"draft {step} of {item}: off by {(got - wanted)[~is_close].abs().max():.1e}"
                )

    def expected(self, item: Round) -> torch.Tensor:
        """[number of drafts, vocab_size]"""
        context = torch.tensor(item.confirmed)
        if self._reference is not None:
            with torch.no_grad():
                return self._reference.draft_logits(self._workshop.target.run(context), item.drafts[:-1])
        sequence = torch.cat((context, torch.tensor(item.drafts[:-1], dtype=torch.int64)))
        return self._model.run(sequence).logits[len(context) - 1 :]
