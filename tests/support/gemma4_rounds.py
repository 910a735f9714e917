"""Watches a Gemma 4 assistant at work: every round of every request against the reference, step by step.

draft_rounds.py does the same for heads and models with a dense head; an assistant also has a sparse one, and a policy
of where its drafts stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.spec_decode.autoregressive import AutoRegressiveSpeculator
from engine.spec_decode.speculator import ProposalInputs
from tests.support.draft_rounds import TOLERANCE, Round, RoundRecorder
from tests.support.gemma4_reference import AssistantReference, PositionPolicy, TargetRun


def record_assistant_rounds(speculator: AutoRegressiveSpeculator) -> list[Round]:
    """From now on every round is appended to the list, with the logits over the whole vocabulary."""
    recorder = RoundRecorder()
    watched: Any = speculator
    inner, model = watched.sample_draft, watched._model

    def sample_draft(hidden: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor) -> torch.Tensor:
        drafts: torch.Tensor = inner(hidden, inputs, positions)
        if model.centroid_head is None:
            logits = model.head.logits(hidden)
        else:
            scores, token_ids = model.centroid_head(hidden)
            logits = scores.new_full((len(hidden), len(model.head.weight)), float("-inf"))
            logits.scatter_(1, token_ids, scores)
        recorder.record(logits, drafts, inputs, positions)
        return drafts

    watched.sample_draft = sample_draft
    return recorder.rounds


class AssistantChecker:
    """Compares rounds with the reference. Each follows a prefix of one of the texts that were run."""

    def __init__(self, assistant: AssistantReference, policy: PositionPolicy) -> None:
        self._assistant = assistant
        self._policy = policy
        self._runs: list[TargetRun] = []

    def check(self, rounds: Sequence[Round], *, is_greedy: bool = True) -> None:
        """Raises AssertionError for the first draft whose logits are others, or, of greedy requests, that is not their
        argmax."""
        assert rounds, "nothing was drafted"
        of_run: dict[int, list[Round]] = {}
        for item in sorted(rounds, key=lambda item: -len(item.confirmed)):
            of_run.setdefault(self._run_of(item.confirmed), []).append(item)
        for run, items in of_run.items():
            for item, expected in zip(items, self._expected(self._runs[run], items), strict=True):
                _compare(item, expected, is_greedy)

    @torch.no_grad()
    def _expected(self, run: TargetRun, rounds: Sequence[Round]) -> torch.Tensor:
        """[number of rounds, most drafts, vocab_size]; of what stands behind a round's last draft it says nothing."""
        k = max(len(item.drafts) for item in rounds)
        last_keys = torch.tensor([len(item.confirmed) - 2 for item in rounds])
        chains = [[item.confirmed[-1], *item.drafts, *[0] * k][:k] for item in rounds]
        steps = self._assistant.along(run, last_keys, torch.tensor(chains), self._policy)
        return torch.stack([self._assistant.logits(normed) for normed in steps], dim=1)

    @torch.no_grad()
    def _run_of(self, confirmed: Sequence[int]) -> int:
        """Index of a run of a text that starts with these tokens: what comes later changes nothing before it."""
        tokens = torch.tensor(confirmed)
        for index, run in enumerate(self._runs):
            if torch.equal(run.token_ids[: len(tokens)], tokens):
                return index
        self._runs.append(self._assistant.target.run(tokens))
        return len(self._runs) - 1


def _compare(item: Round, expected: torch.Tensor, is_greedy: bool) -> None:
    for step, got in enumerate(item.logits):
        is_close = torch.isclose(got, expected[step], rtol=0.0, atol=TOLERANCE)  # -inf equals -inf
        assert is_close.all(), (
            f"draft {step} of {item}: off by {(got - expected[step])[~is_close].abs().max():.1e}"
        )
        assert not is_greedy or item.drafts[step] == int(expected[step].argmax()), f"draft {step} of {item}"
