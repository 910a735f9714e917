"""Renders the Helm chart with Helm's own library, without a cluster.

`python -m tools.render_chart FOLDER` writes the manifests of every value set in `ci/` there, for tools that judge
manifests (`make scan`). Needs helm-python-sdk, which has wheels for Linux on x86_64 only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent.parent / "deploy" / "helm" / "slipstream"
VALUE_SETS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "demo", "prod"

Manifest = dict[str, Any]


def values_of(value_set: str) -> dict[str, Any]:
    """What the file of a value set says."""
    return yaml.safe_load((CHART / "ci" / f"{value_set}-values.yaml").read_text(encoding="utf-8")) or {}


def render_texts(values: dict[str, Any]) -> dict[str, str]:
    """Text by template, NOTES.txt too. Raises helm_python's HelmError."""
    import helm_python  # here, so that who lacks it can still list the value sets

    with helm_python.Chart.load(str(CHART)) as chart:
        texts: dict[str, str] = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    return {Path(name).name: text for name, text in texts.items()}


def render(values: dict[str, Any]) -> list[Manifest]:
    """All manifests. Raises helm_python's HelmError."""
    return [
        manifest
        for name, text in render_texts(values).items()
        if name.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Render every value set of the chart.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for value_set in VALUE_SETS:
        text = yaml.safe_dump_all(render(values_of(value_set)), sort_keys=False)
        (folder / f"{value_set}.yaml").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
