"""Prompt files of the speculation benchmarks: read, choose by seed, turn texts into "repeat with edits" prompts.

A file has one JSON object a line with `turns` (texts; the first is asked) and, where it has them, `set` and `task`,
by which results are grouped. Knows no tokenizer; `encode` borrows the server's.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from engine.checkpoint.tokenizer_files import load_hf_tokenizer
from engine.config import ModelConfig
from engine.errors import ConfigError
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.text import TextProcessor

EDIT_SET = "repeat_with_edits"
_EXCERPT_WORDS = 60
_MIN_LETTERS = 4  # of a word that an edit changes


@dataclass(frozen=True)
class Prompt:
    """What a user asks."""

    set_name: str
    task: str
    text: str


def add_prompts_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        type=Path,
        action="append",
        required=True,
        metavar="JSONL",
        help='lines of {"turns": [text, ...], "set": ..., "task": ...}; may be given more than once',
    )


def read_prompts(paths: Iterable[Path]) -> list[Prompt]:
    """All prompts of all files, in order. Raises ConfigError."""
    return [prompt for path in paths for prompt in _read_file(path)]


def _read_file(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a prompt file: {error}") from None
    prompts = [_read_line(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path}: got no prompts, expected one JSON object per line")
    return prompts


def _read_line(line: str, path: Path, number: int) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{number}: not JSON: {error}") from None
    match entry:
        case {"turns": [str(text), *_]}:
            set_name = str(entry.get("set", path.stem))
            return Prompt(set_name, str(entry.get("task", set_name)), text)
    raise ConfigError(f"{path}:{number}: got no `turns`, expected a list that starts with a text")


def group_by(prompts: Iterable[Prompt], name_of: Callable[[Prompt], str]) -> dict[str, list[Prompt]]:
    """Prompts by set or task, in order of appearance."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(name_of(prompt), []).append(prompt)
    return groups


def choose(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` of them, or all if there are fewer: drawn by the seed, and from the tasks in turn."""
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    by_task = group_by(shuffled, lambda prompt: prompt.task)
    turns = chain.from_iterable(zip_longest(*(by_task[task] for task in sorted(by_task))))
    return [prompt for prompt in turns if prompt is not None][:count]


def edit_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Prompts whose answer is nearly a copy: repeat a text that one of `prompts` ends with, with one word changed.

    Texts that are too short for that, or hold no word to change, are left out.
    """
    edits = []
    for prompt in prompts:
        words = prompt.text.split()
        excerpt = words[-_EXCERPT_WORDS:]
        candidates = Counter(word for word in excerpt if word.isalpha() and len(word) >= _MIN_LETTERS)
        if len(words) < 2 * _EXCERPT_WORDS or not candidates:  # an instruction may stand before the text
            continue
        word = candidates.most_common(1)[0][0]
        text = (
            f'Repeat the following text word for word, but write "{word.upper()}" instead of "{word}". '
            f"Answer with the text only.\n\n{' '.join(excerpt)}"
        )
        edits.append(Prompt(EDIT_SET, EDIT_SET, text))
    return edits


async def encode(model: str, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of each prompt as a user's message, by the checkpoint's chat template."""
    processor = TextProcessor(load_hf_tokenizer(ModelConfig(model=model)))
    try:
        chats = [
            pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=prompt.text)]) for prompt in prompts
        ]
        return [(await processor.encode_chat(chat))[1] for chat in chats]
    finally:
        processor.close()
