"""benchmarks/prompt_sets.py: prompt files, the choice by seed, and prompts made of texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.prompt_sets import EDIT_SET, Prompt, choose, edit_prompts, group_by, read_prompts
from engine.errors import ConfigError


def write_lines(path: Path, *entries: object) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n")
    return path


def test_a_line_is_its_first_turn_with_set_and_task(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "some.jsonl",
        {"id": "a", "set": "bench", "task": "qa", "turns": ["first", "second"]},
        {"turns": ["alone"]},
    )
    assert read_prompts([path]) == [Prompt("bench", "qa", "first"), Prompt("some", "some", "alone")]


def test_files_follow_one_another_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", {"turns": ["one"]})
    second = tmp_path / "b.jsonl"
    second.write_text('\n{"turns": ["two"]}\n\n')
    assert [prompt.text for prompt in read_prompts([first, second])] == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "got no prompts"),
        ("{", r"prompts.jsonl:1: not JSON"),
        ('{"turns": ["a"]}\n{"turns": []}', r"prompts.jsonl:2: got no `turns`"),
        ('{"prompt": "raw"}', "got no `turns`"),
        ("[1]", "got no `turns`"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts([path])


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl: cannot be read"):
        read_prompts([tmp_path / "none.jsonl"])


def some_prompts() -> list[Prompt]:
    return [Prompt("bench", task, f"{task} {i}") for task in ("qa", "sum") for i in range(10)]


def test_the_choice_takes_tasks_in_turn_and_depends_on_the_seed_only() -> None:
    chosen = choose(some_prompts(), 6, seed=1)
    assert [prompt.task for prompt in chosen] == ["qa", "sum"] * 3
    assert len(set(chosen)) == 6
    assert chosen == choose(some_prompts(), 6, seed=1)
    assert chosen != choose(some_prompts(), 6, seed=2)


def test_a_task_that_runs_out_leaves_its_turns_to_the_others() -> None:
    prompts = [Prompt("bench", "rare", "r"), *(Prompt("bench", "usual", f"u{i}") for i in range(5))]
    assert len(choose(prompts, 4, seed=0)) == 4
    assert len(choose(prompts, 100, seed=0)) == 6


def test_groups_keep_the_order_of_appearance() -> None:
    groups = group_by(some_prompts(), lambda prompt: prompt.task)
    assert list(groups) == ["qa", "sum"]
    assert [prompt.text for prompt in groups["sum"]] == [f"sum {i}" for i in range(10)]


def test_an_edit_repeats_the_end_of_a_text_with_its_commonest_word_changed() -> None:
    text = "Summarise: " + " ".join(["start"] * 70) + " " + " ".join(["river", "of", "stone"] * 20)
    (edit,) = edit_prompts([Prompt("bench", "sum", text)])
    assert (edit.set_name, edit.task) == (EDIT_SET, EDIT_SET)
    assert 'write "RIVER" instead of "river"' in edit.text
    assert edit.text.endswith("\n\n" + " ".join(["river", "of", "stone"] * 20))


@pytest.mark.parametrize("text", ["too short to be repeated", "1 2 3 " * 80])
def test_texts_that_are_short_or_without_words_make_no_edit(text: str) -> None:
    assert edit_prompts([Prompt("bench", "qa", text)]) == []
