"""Prompts to sample training text with: seeded, of several kinds, and split into training and held-out ones.

Kinds that need text (sums, passages) take it from files; the rest is put together from tables. A prompt is held out by
its own hash, so that the split does not depend on how many prompts are made.
"""

from __future__ import annotations

import random
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORDS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("prompt_words.toml").read_text(encoding="utf-8")
)
HELD_OUT_SHARE = 50  # one prompt of so many
_PASSAGE_WORDS = (60, 420)


@dataclass(frozen=True)
class Prompt:
    """What a user asks. `kind`: which generator made it."""

    kind: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.text.encode()) % HELD_OUT_SHARE == 0


Generator = Callable[[random.Random], str]


class PromptSource:
    """Endless prompts. `sums`: questions of word problems; `passages`: prose to be summarised and asked about."""

    def __init__(
        self, seed: int, weights: Mapping[str, float], sums: Sequence[str] = (), passages: Sequence[str] = ()
    ) -> None:
        generators: dict[str, Generator] = dict(_GENERATORS)
        if sums:
            generators["sums"] = lambda rng: rng.choice(sums)
        if passages:
            generators["passage"] = lambda rng: _about_passage(rng, passages)
        self._generators = {kind: generators[kind] for kind in weights if kind in generators}
        self._weights = [weights[kind] for kind in self._generators]
        self._random = random.Random(seed)

    def take(self, *, held_out: bool) -> Iterator[Prompt]:
        """Prompts of one side of the split; a prompt may come again."""
        kinds = list(self._generators)
        while True:
            kind = self._random.choices(kinds, self._weights)[0]
            prompt = Prompt(kind, self._generators[kind](self._random))
            if prompt.is_held_out == held_out:
                yield prompt


def questions_of(documents: Sequence[str]) -> list[str]:
    """The questions of documents that say "Question: ... Answer: ..."."""
    return [
        document.split("Question:", 1)[1].split("\nAnswer:", 1)[0].strip()
        for document in documents
        if "Question:" in document and "\nAnswer:" in document
    ]


def _story(rng: random.Random) -> str:
    hero, goal, place = (
        rng.choice(_WORDS["heroes"]),
        rng.choice(_WORDS["goals"]),
        rng.choice(_WORDS["places"]),
    )
    mood, name = rng.choice(_WORDS["moods"]), rng.choice(_WORDS["names"])
    return rng.choice(
        (
            f"Write a short story about {hero} who {goal}.",
            f"Tell me a {mood} story about {hero} {place}.",
            f"Write a {mood} short story for young children: {hero} {goal} {place}.",
            f"Tell me a bedtime story about {hero} who {goal}. Use simple words.",
            f"Write a story in two paragraphs that takes place {place}. {hero.capitalize()} {goal}.",
            f"Write a short story that begins with: Once upon a time there was {hero}.",
            f"Tell me a short story about {name} and {hero} {place}.",
            f"Make up a {mood} tale in which {hero} {goal}.",
        )
    )


def _question(rng: random.Random) -> str:
    thing, phenomenon, skill = (
        rng.choice(_WORDS["things"]),
        rng.choice(_WORDS["phenomena"]),
        rng.choice(_WORDS["skills"]),
    )
    fact = rng.choice(_WORDS["facts"]).format(country=rng.choice(_WORDS["countries"]))
    person = rng.choice(_WORDS["people"])
    return rng.choice(
        (
            f"What is {thing}?",
            f"Explain {thing} to a child.",
            f"Explain in three sentences why {phenomenon}.",
            f"Why do you think {phenomenon}?",
            f"Why is it that {phenomenon}?",
            f"How do I {skill}?",
            f"Give me five tips on how to {skill}.",
            f"What are the steps to {skill}?",
            f"Tell me about {fact}.",
            f"Who was {person}?",
            f"What is {person} famous for?",
            f"How does {thing} work?",
            f"What are the advantages and disadvantages of {thing}?",
            f"When and where was {person} born?",
            f"What is the difference between {thing} and {rng.choice(_WORDS['things'])}?",
        )
    )


def _writing(rng: random.Random) -> str:
    text = rng.choice(_WORDS["letters"])
    return rng.choice(
        (f"Write {text}.", f"Please write {text}.", f"Draft {text}. Keep it short and to the point.")
    )


def _code(rng: random.Random) -> str:
    name, signature, purpose, call, result = rng.choice(_WORDS["functions"])
    if rng.random() < 0.3:
        return f"Write a Python {rng.choice(('function', 'program', 'script'))} that {rng.choice(_WORDS['tasks'])}."
    if rng.random() < 0.2:
        return f"Write a Python function {name}({signature}. {purpose}"
    suffix = rng.choice(("", "", "_of", "_all", "_2", "_fast"))
    header = "from typing import Dict, List\n\n\n" if "List" in signature or "Dict" in signature else ""
    example = f"    >>> {name}{suffix}({call})\n    {result}\n" if rng.random() < 0.8 else ""
    return f'{header}def {name}{suffix}({signature}:\n    """ {purpose}\n{example}    """\n'


def _arithmetic(rng: random.Random) -> str:
    name, friend = rng.sample(_WORDS["names"], 2)
    goods, many, few, times = (
        rng.choice(_WORDS["goods"]),
        rng.randint(12, 90),
        rng.randint(2, 11),
        rng.randint(2, 6),
    )
    return rng.choice(
        (
            f"{name} has {many} {goods} and gives {few} to {friend}. How many {goods} does {name} have left?",
            f"{name} buys {times} boxes with {few} {goods} each. How many {goods} are that altogether?",
            f"{name} has {few} {goods}. {friend} has {times} times as many. How many do they have together?",
            f"A shop sells {many} {goods} a day. Each costs ${few}. How much money does it make in {times} days?",
            f"{name} shares {few * times} {goods} equally among {times} friends. How many does each one get?",
            f"What is {many} + {few} * {times}?",
        )
    )


def _translation(rng: random.Random) -> str:
    parts = [rng.choice(_WORDS[name]) for name in ("german_subjects", "german_verbs", "german_ends")]
    return f"Translate German to English: {' '.join(parts)} ."


def _about_passage(rng: random.Random, passages: Sequence[str]) -> str:
    text = rng.choice(passages).split()
    length = rng.randint(*_PASSAGE_WORDS)
    start = rng.randrange(max(len(text) - length, 1))
    excerpt = " ".join(text[start : start + length])
    return rng.choice(
        (
            f"Summarize: {excerpt}",
            f"Summarize the following text in two sentences.\n\n{excerpt}",
            f"{excerpt}\nWhat is this text about?",
            f"{excerpt}\nWho is named in this text?",
            f"Read the text and answer the question.\n\n{excerpt}\n\nQuestion: What happens here?",
        )
    )


_GENERATORS: Mapping[str, Generator] = {
    "story": _story,
    "question": _question,
    "writing": _writing,
    "code": _code,
    "arithmetic": _arithmetic,
    "translation": _translation,
}
