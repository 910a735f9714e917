"""The script that holds the recipe: it ends at the first failure, and what it made comes back in a few pieces."""

from __future__ import annotations

import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "tools" / "train" / "reproduce.sh"
# In place of Python: notes the stage, fails if it is the one, writes something to the --output; sampling of SmolLM2
# first writes, and then would take a minute.
FAKE_PYTHON = """#!/bin/sh
stage=$3 output= model=
while [ $# -gt 0 ]; do
    case $1 in --output) output=$2 ;; --model) model=$2 ;; esac
    shift
done
echo "$stage $output" >> "$STAGES"
[ "$stage" != "$FAILING" ] || exit 3
mkdir -p "$output"
head -c 40000 /dev/zero > "$output/made.jsonl.gz"
[ "$stage $model" != "sample smollm2.gguf" ] || exec sleep "$SAMPLING_SECONDS"
"""


@dataclass
class Script:
    folder: Path

    @property
    def stages(self) -> list[str]:
        return [line.split()[0] for line in (self.folder / "stages").read_text().splitlines()]

    def run(self, *stages: str, failing: str = "none", sampling_seconds: str = "0") -> int:
        python = self.folder / "python"
        python.write_text(FAKE_PYTHON)
        python.chmod(0o755)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(python),
            "STAGES": str(self.folder / "stages"),
            "FAILING": failing,
            "SAMPLING_SECONDS": sampling_seconds,
            "WORK": str(self.folder / "work"),
            "OUT": str(self.folder / "out"),
            "PIECE": "30000",
            "TEXT": "texts",
            "SMOLLM2": "smollm2.gguf",
        }
        command = ["sh", str(SCRIPT), *stages]
        return subprocess.run(command, env=environment, cwd=self.folder, timeout=30, check=False).returncode


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_a_stage_that_fails_is_the_last(script: Script) -> None:
    assert script.run("target", "own_text", "eagle", failing="sample") == 3
    assert script.stages == ["target", "sample"]


def test_sampling_that_fails_ends_the_smoke_run_before_it_begins(script: Script) -> None:
    assert script.run("text_and_smoke", "target", failing="sample") == 3
    assert script.stages == ["sample"]


@pytest.mark.parametrize("failing", ["target", "assistant"])
def test_a_smoke_run_that_fails_ends_the_sampling(failing: str, script: Script) -> None:
    assert script.run("text_and_smoke", "target", failing=failing, sampling_seconds="60") == 3
    assert script.stages[-1] == failing


def test_sampling_and_smoke_run_leave_the_text_alone(script: Script) -> None:
    assert script.run("text_and_smoke") == 0
    assert script.stages == ["sample", "target", "sample", "assistant", "eagle"]
    assert members(script) == {"text/made.jsonl.gz"}


def test_results_of_all_stages_come_back_as_one_archive_in_pieces(script: Script) -> None:
    assert script.run("target", "own_text", "assistant") == 0
    assert members(script) == {
        f"{name}/made.jsonl.gz"
        for name in ("tiny-gemma4", "own-text", "assistant-last_key", "assistant-last_token")
    }


def test_a_broad_head_is_made_of_what_the_target_asks_itself(script: Script) -> None:
    assert script.run("broad_text", "broad_eagle") == 0
    assert script.stages == ["ask", "sample", "eagle"]
    assert members(script) == {
        f"{name}/made.jsonl.gz" for name in ("asked", "broad-text", "smollm2-eagle3-broad")
    }


def members(script: Script) -> set[str]:
    pieces = sorted((script.folder / "out").iterdir())
    assert all(piece.stat().st_size <= 30000 for piece in pieces)
    whole = script.folder / "whole.tar"
    whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(whole) as archive:
        return {member.name for member in archive if member.isfile()}
