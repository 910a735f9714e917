"""What acceptance a draft model should have, worked out without the engine: transformers over a text that is given.

A greedy chain of drafts goes on from the text itself as long as all its tokens were right, and counts for nothing
behind the first wrong one. So one pass over the text, which yields the drafter's choice at every position, gives all
chains that a verification can start from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.stats import SpecObservation
from tests.support.gguf_reference import load_gguf_reference


class GreedyReference:
    """A GGUF checkpoint in transformers."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._model: Any = load_gguf_reference(path, dtype)

    def choices(self, prompt: Sequence[int], text: Sequence[int]) -> list[int]:
        """For each token of `text`, the most likely one given the prompt and the text before it."""
        ids = torch.tensor([[*prompt, *text[:-1]]])  # [1, num_tokens] int64
        with torch.inference_mode():
            logits = self._model(ids, logits_to_keep=len(text)).logits[0]  # [len(text), vocab_size]
        choices: list[int] = logits.argmax(dim=-1).tolist()
        return choices


def simulate(
    text: Sequence[int], choices: Sequence[int], k: int, max_tokens: int, method: str
) -> list[SpecObservation]:
    """The verifications in which `text`, what the target wrote, would have come about with k greedy drafts.

    `choices`: the drafter's token at each position, given the true text before it. The prefill brings token 0 without
    drafts, and no more are made than `max_tokens` leaves room for beside the target's own token.

    Example, k = 3: text [5, 6, 7, 8, 9], choices [_, 6, 7, 1, 9], max_tokens 5. After token 5 the drafts start 6, 7 and
    are wrong then: three tokens are emitted (6, 7, and 8 from the target). Then one token is left, for which nothing is
    drafted: the acceptance length is 3 in one verification.
    """
    rounds = []
    position = 1
    while position < len(text):
        num_drafted = min(k, max_tokens - position - 1)
        if num_drafted == 0:
            break
        window = range(position, min(position + num_drafted, len(text)))
        num_right = next(
            (i - position for i in window if choices[i] != text[i]),
            len(window),
        )
        num_emitted = min(num_right + 1, len(text) - position)  # the text may end with an accepted draft
        rounds.append(
            SpecObservation(
                method=method,
                num_drafted=num_drafted,
                num_verifier_accepted=num_right,
                num_accepted=min(num_right, num_emitted),
                num_emitted=num_emitted,
            )
        )
        position += num_emitted
    return rounds
