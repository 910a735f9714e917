"""What documents say of the repository is so: files, headings, tests, modules and settings that they name exist.

It reads documents only; what the commands in them do is the business of the end-to-end tests.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.config import ServerConfig

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = sorted(
    [ROOT / "README.md"]
    + [
        path
        for folder in ("docs", "deploy", "models", "benchmarks")
        for path in (ROOT / folder).rglob("*.md")
    ]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TEST = re.compile(r"`(?:tests/)?((?:[\w/]+\.py)?)::(\w+)")
# Defaults that the README does not write as their values.
IN_WORDS = {
    "required": "",
    "last part of `model`": "",
    "the model's": None,
    "a share of what is free": None,
    "none": None,
    "on": True,
}


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in LINK.findall(document.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_modules_that_are_run_exist(document: Path) -> None:
    own = re.findall(r"python3? -m ((?:tools|benchmarks|server)[\w.]*)", document.read_text(encoding="utf-8"))
    for module in own:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_nothing_is_installed_under_our_name_from_an_index() -> None:
    """The project is on none: whatever is called so there is somebody else's."""
    texts = [*DOCUMENTS, *(ROOT / "server").glob("*.py")]
    assert not [by_name(path) for path in texts if re.search(r"pip install '?slipstream", path.read_text())]


def test_the_tests_of_known_faults_exist() -> None:
    checked = 0
    for line in (ROOT / "docs/known-faults.md").read_text(encoding="utf-8").splitlines():
        file = ""
        for named, test in TEST.findall(line):
            file = named or file  # `::test` is one of the file before
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"\bdef {test}\b", source), f"{file}::{test}"
            checked += 1
    assert checked > 100


def settings_of_the_readme() -> list[tuple[str, str]]:
    """Setting and default, one each: a row may have several, with a default each or one for all."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("| setting | default |")[2]
    pairs: list[tuple[str, str]] = []
    for names, default in re.findall(
        r"^\| (`.*?) \| (.*?) \|", section.partition("\n\n")[0], flags=re.MULTILINE
    ):
        settings, defaults = re.findall(r"`([a-z-]+)`", names), default.split(", ")
        if len(defaults) != len(settings):
            defaults = [default] * len(settings)
        pairs += zip(settings, defaults, strict=True)
    return pairs


@pytest.mark.parametrize(("name", "default"), settings_of_the_readme())
def test_settings_of_the_readme_have_their_defaults(name: str, default: str) -> None:
    value = ServerConfig.model_fields[name.replace("-", "_")].default
    if default in IN_WORDS:
        assert value == IN_WORDS[default]
    else:  # "30 s", "`127.0.0.1`", "0 (off)"
        written = default.replace("`", "").split()[0]
        assert written == (f"{value:g}" if isinstance(value, float) else str(value))


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_variables_of_the_server_are_settings(document: Path) -> None:
    clients = {"TOKEN", "ADDRESS", "CACHE", "TLS_CA", "CLIENT_CERT", "CLIENT_KEY"}
    named = set(re.findall(r"\bSLIPSTREAM_([A-Z_]+)\b", document.read_text(encoding="utf-8")))
    assert named - clients <= {name.upper() for name in ServerConfig.model_fields}
