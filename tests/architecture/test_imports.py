"""What may import what: the layers of the design, and no torch where torch has no business."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

# Imports the modules named on its command line and prints the first that brought torch in.
_FIRST_WITH_TORCH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"torch is loaded after importing {name}")
"""


def modules_of(package: str) -> list[str]:
    found = pkgutil.walk_packages([str(ROOT / package.replace(".", "/"))], prefix=f"{package}.")
    return [package, *(module.name for module in found)]


def test_imports_follow_the_contracts() -> None:
    """In a process of its own: the linter disables all loggers that exist."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "modules",
    [
        modules_of("server"),
        modules_of("engine.scheduler"),
        modules_of("engine.text"),
        ["engine.finish", "engine.client.base", "engine.client.process", "engine.config"],
    ],
    ids=["server", "scheduler", "text", "engine seams"],
)
def test_a_fresh_interpreter_has_no_torch_after_importing(modules: list[str]) -> None:
    modules = [name for name in modules if not name.endswith("__main__")]
    command = [sys.executable, "-c", _FIRST_WITH_TORCH, *modules]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
