"""Prompts that the target makes up itself: given the beginning of a user's turn, a chat model goes on as a user would
(Xu et al. 2024, arXiv:2406.08464). What it knows decides what is asked, and nobody has to write lists of words.

Leads say how a turn begins, and which system prompt stands before it; some make the model write articles, which are no
questions but something to ask about.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.train.loops import loop_start
from tools.train.prompts import LEADS, Prompt
from tools.train.samples import Sample, read_samples

ARTICLE = "article"  # the kind that is asked about
_MARK = "\N{SYMBOL FOR SUBSTITUTE}"  # stands for what the user says
_MIN_WORDS, _MIN_ARTICLE_WORDS = 3, 60


@dataclass(frozen=True)
class Lead(Prompt):
    """`text`: how the user's turn begins; `system`: None, the model's own system prompt, if it has one."""

    system: str | None = None


def leads(seed: int) -> Iterator[Lead]:
    """Endless: of each kind as many as its weight says."""
    rng = random.Random(seed)
    weights = [entry["weight"] for entry in LEADS]
    while True:
        entry = rng.choices(LEADS, weights)[0]
        yield Lead(entry["kind"], rng.choice(entry["begins"]), entry.get("system"))


def open_turn(tokenizer: Any, lead: Prompt) -> str:
    """The chat up to where the user's turn goes on."""
    assert isinstance(lead, Lead)
    messages = [] if lead.system is None else [{"role": "system", "content": lead.system}]
    messages.append({"role": "user", "content": _MARK})
    rendered: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return rendered.split(_MARK)[0] + lead.text


def read_asked(folders: Sequence[Path]) -> dict[str, list[str]]:
    """What was asked, by kind, each text once; without what did not come to its end, and what repeats itself."""
    texts: dict[str, dict[str, None]] = defaultdict(dict)
    for sample in _fit(read_samples(folders)):
        text = f"{sample.prompt}{sample.answer}".strip()
        if len(text.split()) >= (_MIN_ARTICLE_WORDS if sample.kind == ARTICLE else _MIN_WORDS):
            texts[sample.kind][text] = None
    return {kind: list(distinct) for kind, distinct in texts.items()}


def _fit(samples: Iterable[Sample]) -> Iterator[Sample]:
    """An article may lack its end."""
    for sample in samples:
        ended = sample.finish == "stop" or sample.kind == ARTICLE
        if ended and loop_start(sample.answer_ids) == len(sample.answer_ids):
            yield sample
