"""Everything that the README says of a GPU, measured again: one file of benchmarks/results/ after the other.

python -m benchmarks.gpu_figures [--only gpu_steps gpu_startup ...] [--folder benchmarks/results] [--dry-run]

Each file is a command in a process of its own; about fifteen minutes in all on an H200. `--dry-run` prints them.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import run_in_turn
from server.bench.schema import read_result

FIGURES = {  # of the result file: the command
    "gpu_steps": "gpu_steps --geometry smollm2-135m llama-3.1-8b --batch 1 8 64 256 --prefill 4096",
    "gpu_steps_llama_drafts": "gpu_steps --geometry llama-3.1-8b --speculator ngram eagle3 --batch 1 64",
    "gpu_steps_gemma_4_e4b": "gpu_steps --geometry gemma-4-e4b --batch 1 8 64 256 --prefill 4096",
    "gpu_steps_gemma_4_e4b_mtp": "gpu_steps --geometry gemma-4-e4b --speculator gemma4_mtp --batch 1 8 64 256",
    "gpu_steps_gemma_4_31b": "gpu_steps --geometry gemma-4-31b --batch 1 8 64",
    "gpu_steps_gemma_4_31b_mtp": "gpu_steps --geometry gemma-4-31b --speculator gemma4_mtp --batch 1 64",
    "gpu_steps_gemma_4_26b": "gpu_steps --weights normal --geometry gemma-4-26b-a4b --speculator none gemma4_mtp"
    " --batch 1 8 64 --prefill 4096",
    "gpu_steps_deepseek": "gpu_steps --weights normal --geometry deepseek-v2-lite --speculator none mtp --k 1 2 3"
    " --batch 1 64",
    "gpu_steps_normal": "gpu_steps --weights normal --geometry llama-3.1-8b gemma-4-e4b --batch 64 256"
    " --prefill 4096",
    "gpu_steps_normal_31b_mtp": "gpu_steps --weights normal --geometry gemma-4-31b --speculator gemma4_mtp --batch 64",
    "gpu_startup": "gpu_startup --geometry smollm2-135m llama-3.1-8b gemma-4-e4b --runs 1",
    "gpu_service": "gpu_service --geometry smollm2-135m llama-3.1-8b",
}


def command_of(name: str, folder: Path) -> list[str]:
    """What writes the file `name`."""
    module, *words = shlex.split(FIGURES[name])
    return [sys.executable, "-m", f"benchmarks.{module}", *words, "--output", str(folder / f"{name}.json")]


def _succeeds(command: Sequence[str]) -> bool:
    """Runs it; are there rows, and all without an error?"""
    if subprocess.run(command, check=False).returncode != 0:
        return False
    rows = read_result(Path(command[-1])).rows
    return bool(rows) and not any("error" in row for row in rows)


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 when one of them failed, or a row of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(FIGURES), choices=list(FIGURES))
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args(words)
    commands = {name: command_of(name, arguments.folder) for name in arguments.only}
    return run_in_turn(commands, (lambda _: True) if arguments.dry_run else _succeeds)


if __name__ == "__main__":
    sys.exit(main())
