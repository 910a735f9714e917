"""The one command for all figures of a GPU: what it runs are commands that their benchmarks understand."""

from __future__ import annotations

import argparse
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_figures import FIGURES, command_of, main

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class ParsedOnlyError(Exception):
    pass


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_a_command_of_its_benchmark(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parse = argparse.ArgumentParser.parse_args
    seen: list[Any] = []

    def parse_only(self: argparse.ArgumentParser, words: Any = None) -> Any:
        seen.append(parse(self, words))
        raise ParsedOnlyError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    _, _, module, *words = command_of(name, tmp_path)
    with pytest.raises(ParsedOnlyError):
        import_module(module).main(words)
    assert seen[0].output == tmp_path / f"{name}.json"
    assert (RESULTS / f"{name}.json").exists(), "the README has figures of each"


def test_one_that_fails_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(command: list[str], check: bool) -> Any:
        ran.append(Path(command[-1]).stem)
        return subprocess.CompletedProcess(command, len(ran) == 1)

    monkeypatch.setattr(subprocess, "run", run)
    only = ["gpu_startup", "gpu_service"]
    assert main(["--folder", str(tmp_path), "--only", *only]) == 1
    assert ran == only
    assert "failed: gpu_startup" in capsys.readouterr().err
    assert main(["--dry-run"]) == 0
    assert ran == only
    assert capsys.readouterr().out.count("\n") == len(FIGURES)
