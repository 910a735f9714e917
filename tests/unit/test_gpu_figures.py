"""The one command for all figures of a GPU: what it runs are commands that their benchmarks understand."""

from __future__ import annotations

import argparse
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_figures import FIGURES, command_of, main
from server.bench.environment import current_environment
from server.bench.schema import BenchResult, write_result

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
    """It ends with an error, or has a row with one, or none."""
    ran: list[str] = []
    rows: dict[str, list[dict[str, Any]]] = {
        "gpu_service": [{"streams": 1}],
        "gpu_steps": [{"batch": 1}, {"error": "no memory"}],
        "gpu_steps_deepseek": [],
    }

    environment = current_environment(device="none", num_threads=None)

    def run(command: list[str], check: bool) -> Any:
        path = Path(command[-1])
        ran.append(path.stem)
        if path.stem not in rows:
            return subprocess.CompletedProcess(command, 1)
        result = BenchResult(benchmark=path.stem, environment=environment, seed=0, rows=rows[path.stem])
        write_result(result, path)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("benchmarks.gpu_figures.subprocess.run", run)
    only = ["gpu_startup", *rows]
    assert main(["--folder", str(tmp_path), "--only", *only]) == 1
    assert ran == only
    assert "failed: gpu_startup, gpu_steps, gpu_steps_deepseek" in capsys.readouterr().err
    assert main(["--folder", str(tmp_path), "--only", "gpu_service"]) == 0
    ran.clear()
    assert main(["--dry-run"]) == 0
    assert not ran
    assert capsys.readouterr().out.count("\n") == len(FIGURES) + 1
