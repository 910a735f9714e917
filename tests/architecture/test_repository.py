"""Rules about the files of the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
MAX_LINES = 450
SOURCES = sorted(
    path
    for folder in ("server", "engine", "tests", "tools", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "pb" not in path.relative_to(ROOT).parts
)
DOCUMENTS = [
    ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", ".ci/run", "benchmarks/README.md")
]
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|work)/")


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return project["dependencies"] + [entry for extra in extras for entry in extra]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("requirement", requirements())
def test_every_dependency_has_a_lower_and_an_upper_bound(requirement: str) -> None:
    operators = {specifier.operator for specifier in Requirement(requirement).specifier}
    assert ">=" in operators, f"{requirement}: no lower bound"
    assert operators & {"<", "<="}, f"{requirement}: no upper bound"


def test_make_has_the_commands_of_the_project() -> None:
    assert make_targets() >= {"help", "demo", "serve", "test", "test-full", "check", "bench", "protos"}


@pytest.mark.parametrize("document", ["README.md", "benchmarks/README.md"])
def test_make_commands_in_documents_exist(document: str) -> None:
    code = re.findall(r"```.*?```|`[^`]+`", (ROOT / document).read_text(), flags=re.DOTALL)
    named = {target for part in code for target in re.findall(r"\bmake ([a-z-]+)", part)}
    assert named
    assert named <= make_targets()


def test_files_are_small() -> None:
    long = {str(path.relative_to(ROOT)): lines for path in SOURCES if (lines := num_lines(path)) > MAX_LINES}
    assert not long, f"got files over {MAX_LINES} lines: {long}"


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    files = [path for path in (*SOURCES, *DOCUMENTS) if path != Path(__file__)]
    found = [str(path.relative_to(ROOT)) for path in files if MACHINE_PATH.search(path.read_text())]
    assert not found


def test_every_module_says_why_it_exists() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if (text := path.read_text().strip()) and not text.startswith(('"""', 'r"""'))
    ]
    assert not silent
