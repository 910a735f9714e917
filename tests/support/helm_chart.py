"""The Helm chart as tests see it: rendered, and searched.

Knows nothing of what the manifests should say.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tools.render_chart import CHART, VALUE_SETS, Manifest, render, render_texts, values_of

helm = pytest.importorskip("helm_python", reason="Helm's library has wheels for Linux on x86_64 only")

__all__ = [
    "CHART",
    "VALUE_SETS",
    "Manifest",
    "find",
    "helm",
    "manifests_of",
    "pod_spec",
    "render",
    "render_texts",
    "server_container",
    "values_of",
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
