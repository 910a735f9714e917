"""Prompts that a model makes up itself: how its turn is opened, and what of its words is asked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.train.asking import ARTICLE, Lead, leads, open_turn, read_asked
from tools.train.prompts import LEADS, PromptSource
from tools.train.recipes import BROAD_KINDS
from tools.train.samples import Sample, SampleWriter

PASSAGES = [" ".join(f"and Anna{number} went" for number in range(900)), "A short one with Ben Miller in it."]
SENTENCE = "What is the name of the river here?"
DISTINCT_IDS = list(range(40))


class Tokenizer:
    """Renders [role: content], one behind the other."""

    def apply_chat_template(self, messages: Sequence[Any], *, tokenize: bool) -> str:
        assert not tokenize
        return "".join(f"[{message['role']}: {message['content']}]" for message in messages)


def write(
    folder: Path, *samples: tuple[str, str, str, str], answer_ids: Sequence[int] = DISTINCT_IDS
) -> None:
    """Samples of (kind, lead, what came behind it, finish)."""
    writer = SampleWriter(folder, "asked")
    for kind, lead, answer, finish in samples:
        writer.add(
            Sample(
                kind=kind,
                prompt=lead,
                answer=answer,
                prompt_ids=[1],
                answer_ids=list(answer_ids),
                temperature=1.0,
                finish=finish,
            )
        )
    writer.flush()


def test_the_turn_is_left_open_behind_the_lead() -> None:
    assert open_turn(Tokenizer(), Lead("asked", "Who was", None)) == "[user: Who was"
    assert open_turn(Tokenizer(), Lead(ARTICLE, "", "Be brief.")) == "[system: Be brief.][user: "


def test_leads_are_of_all_kinds_and_repeatable() -> None:
    found = [list(itertools.islice(leads(3), 300)) for _ in range(2)]
    assert found[0] == found[1]
    assert {lead.kind for lead in found[0]} == {entry["kind"] for entry in LEADS}


def test_every_asked_kind_is_drawn_by_the_broad_mixture() -> None:
    assert {entry["kind"] for entry in LEADS} - {ARTICLE} <= set(BROAD_KINDS)
    asked = {entry["kind"]: [SENTENCE] for entry in LEADS}
    source = PromptSource(3, BROAD_KINDS, ["What is 1 + 1?"], PASSAGES, asked)
    prompts = list(itertools.islice(source.take(held_out=False), 400))
    assert {prompt.kind for prompt in prompts} == set(BROAD_KINDS)
    assert {prompt.text for prompt in prompts if prompt.kind == "asked"} == {SENTENCE}


def test_long_texts_are_put_together_and_end_in_a_question() -> None:
    source = PromptSource(0, {"retrieval": 1.0}, passages=PASSAGES)
    prompts = [prompt.text for prompt in itertools.islice(source.take(held_out=False), 60)]
    assert all(250 < len(text.split()) < 700 for text in prompts)
    assert any(text.endswith("?") and "\n" in text for text in prompts)


def test_what_is_asked_is_lead_and_answer_each_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        ("asked_question", "What is", " the name of the river here?", "stop"),
        ("asked_question", "What", " is the name of the river here?", "stop"),
        ("asked", "", "Write a poem about rain.", "stop"),
    )
    assert read_asked([tmp_path]) == {"asked_question": [SENTENCE], "asked": ["Write a poem about rain."]}


def test_unfinished_short_and_repeating_prompts_are_left_out(tmp_path: Path) -> None:
    article = "word " * 80
    write(
        tmp_path,
        ("asked", "", "Write a poem about", "length"),
        ("asked", "", "That is.", "stop"),
        (ARTICLE, "", "Too short to ask about.", "stop"),
        (ARTICLE, "By", f" {article}", "length"),
    )
    write(tmp_path, ("asked", "", "This one goes round and round.", "stop"), answer_ids=[5, 6] * 40)
    assert read_asked([tmp_path]) == {ARTICLE: [f"By {article}".strip()]}
