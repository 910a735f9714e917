"""The Helm chart as tests see it: rendered by Helm's own library, without a cluster.

Knows the chart's folder and Helm; nothing of what the manifests should say.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="Helm's library has wheels for Linux on x86_64 only")

CHART = Path(__file__).parent.parent.parent / "deploy" / "helm" / "slipstream"
VALUE_SETS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "demo", "prod"

Manifest = dict[str, Any]


def values_of(value_set: str) -> dict[str, Any]:
    return yaml.safe_load((CHART / "ci" / f"{value_set}-values.yaml").read_text()) or {}


def render_texts(values: dict[str, Any]) -> dict[str, str]:
    """Text by template. Raises helm_python's HelmError."""
    with helm.Chart.load(str(CHART)) as chart:
        texts: dict[str, str] = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    return {Path(name).name: text for name, text in texts.items()}


def render(values: dict[str, Any]) -> list[Manifest]:
    texts = render_texts(values)
    return [
        manifest
        for name, text in texts.items()
        if name.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


@cache
def manifests_of(value_set: str) -> list[Manifest]:
    """Shared between tests: not to be changed."""
    return render(values_of(value_set))


def find(manifests: list[Manifest], kind: str, suffix: str = "") -> Manifest:
    """The one manifest of this kind whose name ends so."""
    found = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, f"got {len(found)} manifests of kind {kind} with a name in *{suffix}, expected 1"
    return found[0]


def pod_spec(manifests: list[Manifest]) -> dict[str, Any]:
    spec: dict[str, Any] = find(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def server_container(manifests: list[Manifest]) -> dict[str, Any]:
    (container,) = pod_spec(manifests)["containers"]
    assert isinstance(container, dict)
    return container
