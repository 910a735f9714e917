"""Prompts to sample training text with: seeded, of several kinds, and split into training and held-out ones.

Kinds that need text (sums, passages, what a model asked itself) take it from files; the rest is put together from
tables. A prompt is held out by its own hash, so that the split does not depend on how many prompts are made.
"""

from __future__ import annotations

import random
import re
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_WORDS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("prompt_words.toml").read_text(encoding="utf-8")
)
HELD_OUT_SHARE = 50  # one prompt of so many
_PASSAGE_WORDS = (60, 420)
_LONG_PASSAGE_WORDS = (300, 600)
_FEWEST_WORDS = 20
_WORD_CHARACTERS = 7  # more than a word and its blank have
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+)*")  # not the first word of a sentence

# How the user's turn begins that asking.py lets a model go on with: tables of kind, weight, begins, perhaps system.
LEADS: Sequence[Mapping[str, Any]] = _WORDS["leads"]


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
    """Endless prompts. `sums`: questions of word problems; `passages`: prose to be summarised and asked about; `asked`:
    ready prompts by kind."""

    def __init__(
        self,
        seed: int,
        weights: Mapping[str, float],
        sums: Sequence[str] = (),
        passages: Sequence[str] = (),
        asked: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        generators: dict[str, Generator] = dict(_GENERATORS)
        ready = {kind: texts for kind, texts in {**(asked or {}), "sums": sums}.items() if texts}
        for kind, texts in ready.items():
            generators[kind] = partial(_choose, texts=texts)
        if passages:
            generators["passage"] = partial(_about_passage, passages=passages)
            generators["long_passage"] = partial(_about_long_passage, passages=passages)
            generators["retrieval"] = partial(_about_found_passages, passages=passages)
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
    excerpt = _excerpt(rng, passages, rng.randint(*_PASSAGE_WORDS))
    return rng.choice(
        (
            f"Summarize: {excerpt}",
            f"Summarize the following text in two sentences.\n\n{excerpt}",
            f"{excerpt}\nWhat is this text about?",
            f"{excerpt}\nWho is named in this text?",
            f"Read the text and answer the question.\n\n{excerpt}\n\nQuestion: What happens here?",
        )
    )


def _about_long_passage(rng: random.Random, passages: Sequence[str]) -> str:
    text = " ".join(_excerpts(rng, passages, rng.randint(*_LONG_PASSAGE_WORDS)))
    return rng.choice(
        (
            f"Summarize: {text}",
            f"Summarize: {text}",
            f"{text}\n\nSummarize the text above.",
            f"Write a short summary of this text.\n\n{text}",
            f"What are the most important points of this text?\n\n{text}",
            f"List all persons and places that are named in this text.\n\n{text}",
        )
    )


def _about_found_passages(rng: random.Random, passages: Sequence[str]) -> str:
    """A question behind passages, as of a search, some of which may have nothing to do with it."""
    found = _excerpts(rng, passages, rng.randint(*_LONG_PASSAGE_WORDS))
    names = _NAME.findall(rng.choice(found)) or _NAME.findall(" ".join(found)) or ["the author"]
    question = rng.choice(_WORDS["passage_questions"]).format(name=rng.choice(names))
    text = "\n".join(found)
    return rng.choice(
        (
            f"{text}\n{question}",
            f"{text}\n{question[0].lower()}{question[1:]}",
            f"Answer the question with what these texts say.\n\n{text}\n\nQuestion: {question}",
            f"{question}\n\n{text}",
        )
    )


def _excerpts(rng: random.Random, passages: Sequence[str], length: int) -> list[str]:
    """Together about so many words; articles are short, so several make a long text."""
    excerpts: list[str] = []
    while (left := length - sum(max(len(excerpt.split()), 1) for excerpt in excerpts)) >= _FEWEST_WORDS:
        excerpts.append(_excerpt(rng, passages, min(left, rng.randint(100, length))))
    return excerpts


def _excerpt(rng: random.Random, passages: Sequence[str], length: int) -> str:
    """At most so many words of one passage, from anywhere in it."""
    text = rng.choice(passages)
    start = rng.randrange(max(len(text) - _WORD_CHARACTERS * length, 1))
    words = text[start : start + _WORD_CHARACTERS * length].split()[:length]
    return " ".join(words if start == 0 else words[1:])


def _choose(rng: random.Random, texts: Sequence[str]) -> str:
    return rng.choice(texts)


_GENERATORS: Mapping[str, Generator] = {
    "story": _story,
    "question": _question,
    "writing": _writing,
    "code": _code,
    "arithmetic": _arithmetic,
    "translation": _translation,
}
