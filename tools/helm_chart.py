"""Writes the generated parts of the Helm chart, or checks them: `python -m tools.helm_chart [--check]`.

README.md is README.in.md with a table of all values in the place of `{{ values }}`: a value is described by the comment
above it in values.yaml. files/rules and files/dashboards are copies, because a chart reads no file outside its folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parent.parent / "deploy"
CHART = DEPLOY / "helm" / "slipstream"
COPIES = {"rules": DEPLOY / "prometheus" / "rules", "dashboards": DEPLOY / "grafana" / "dashboards"}


def readme(template: str, values: str) -> str:
    return template.replace("{{ values }}", values_table(values))


def values_table(values: str) -> str:
    """A Markdown table with one row for each value that is not a mapping, or is an empty one or a described list."""
    root = yaml.compose(values)
    assert isinstance(root, yaml.MappingNode)
    rows = [
        f"| `{path}` | {default} | {text} |" for path, default, text in _rows(root, values.splitlines(), "")
    ]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows])


def _rows(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        path, text = f"{prefix}{key.value}", _comment_above(lines, key.start_mark.line)
        if not (isinstance(value, yaml.MappingNode) and value.value):
            yield path, f"`{_compact(value)}`", text
            continue
        if text:
            yield path, "", text
        yield from _rows(value, lines, f"{path}.")


def _comment_above(lines: list[str], line: int) -> str:
    """The lines of comment that end right above a line, as one."""
    start = line
    while start > 0 and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return " ".join(text.strip().removeprefix("#").strip() for text in lines[start:line]).replace("|", "\\|")


def _compact(node: yaml.Node) -> str:
    return json.dumps(yaml.safe_load(yaml.serialize(node)))


def generated() -> dict[Path, str]:
    """Text by path of every file that this tool writes."""
    files = {
        CHART / "README.md": readme((CHART / "README.in.md").read_text(), (CHART / "values.yaml").read_text())
    }
    for name, source in COPIES.items():
        files |= {CHART / "files" / name / path.name: path.read_text() for path in sorted(source.iterdir())}
    return files


def stale() -> list[Path]:
    """Files that are missing or differ, and copies of what is gone."""
    files = generated()
    differing = {path for path, text in files.items() if not path.is_file() or path.read_text() != text}
    present = {path for name in COPIES for path in (CHART / "files" / name).glob("*")}
    return sorted(differing | (present - set(files)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when files would change")
    is_check = parser.parse_args().check
    files = generated()
    for path in stale():
        if is_check:
            print(f"{path}: differs from what `python -m tools.helm_chart` writes", file=sys.stderr)
        elif path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path])
        else:
            path.unlink()
    return 1 if is_check and stale() else 0


if __name__ == "__main__":
    sys.exit(main())
