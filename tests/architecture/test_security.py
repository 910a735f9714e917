"""What the sources may not contain, whoever writes them: code that runs what it reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted(
    path
    for folder in ("server", "engine", "tools", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "pb" not in path.relative_to(ROOT).parts
)
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_ARGUMENTS = {"shell=True", "trust_remote_code=True", "allow_pickle=True"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "os.system", "os.popen"}


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in FORBIDDEN_MODULES)
            case ast.ImportFrom(module=str(module)):
                if module.partition(".")[0] in FORBIDDEN_MODULES:
                    yield module
            case ast.Call(func=function, keywords=keywords):
                texts = {f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in keywords}
                if ast.unparse(function) in FORBIDDEN_CALLS and "weights_only=True" not in texts:
                    yield ast.unparse(function)
                yield from texts & FORBIDDEN_ARGUMENTS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_it_reads(path: Path) -> None:
    assert list(offences(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "subprocess.run(text, shell=True)",
        "yaml.load(text, Loader=yaml.Loader)",
    ],
)
def test_the_search_finds_what_it_searches_for(source: str) -> None:
    assert list(offences(ast.parse(source)))
