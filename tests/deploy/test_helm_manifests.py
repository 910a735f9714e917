"""Every value set of the chart renders to manifests that Kubernetes and the CRDs would accept."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest

from tests.support.helm_chart import CHART, VALUE_SETS, Manifest, helm, manifests_of, values_of
from tests.support.node_packages import install_node_program

KUBERNETES = "1.36"
OLDEST_KUBERNETES = "1.30"  # kubeVersion in Chart.yaml
CUSTOM_RESOURCES = {
    "BackendTLSPolicy",
    "GRPCRoute",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "ServiceMonitor",
}
NEEDS_NEWER = {"image"}  # value sets with image volumes
WARNING = 2


def is_custom(manifest: Manifest) -> bool:
    return manifest["kind"] in CUSTOM_RESOURCES


def test_the_value_sets_of_the_chart_are_there() -> None:
    wanted = {"default", "cpu", "gpu-gemma4", "keda", "hpa", "tls", "grpcroute", "everything"}
    assert wanted <= set(VALUE_SETS)


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_helm_lint_finds_nothing(value_set: str) -> None:
    report = helm.lint(str(CHART), values_of(value_set), strict=True)
    assert not report["errors"]
    assert not [message for message in report["messages"] if message["severity"] >= WARNING]


@pytest.mark.parametrize(
    ("version", "value_set"),
    [
        *((KUBERNETES, value_set) for value_set in VALUE_SETS),
        *((OLDEST_KUBERNETES, value_set) for value_set in VALUE_SETS if value_set not in NEEDS_NEWER),
    ],
)
def test_kubernetes_accepts_the_manifests(version: str, value_set: str) -> None:
    for manifest in manifests_of(value_set):
        if not is_custom(manifest):
            kubernetes_validate.validate(manifest, version, strict=True)


def crd_problems(manifests: list[Manifest]) -> list[str | None]:
    folder = install_node_program(Path(__file__).parent / "crd_schemas")
    command = ["node", "validate.mjs"]
    result = subprocess.run(
        command,
        cwd=folder,
        input=json.dumps(manifests),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    problems: list[str | None] = json.loads(result.stdout)
    assert len(problems) == len(manifests)
    return problems


def test_custom_resources_fit_their_crds() -> None:
    custom = [manifest for name in VALUE_SETS for manifest in manifests_of(name) if is_custom(manifest)]
    assert {manifest["kind"] for manifest in custom} == CUSTOM_RESOURCES
    problems = crd_problems(custom)
    assert not [problem for problem in problems if problem is not None]


def test_the_crd_check_refuses_a_wrong_manifest() -> None:
    """Else the test above could pass by checking nothing."""
    wrong = [copy.deepcopy(m) for m in manifests_of("everything") if m["kind"] == "ScaledObject"]
    wrong[0]["spec"]["maxReplicaCount"] = "four"
    assert crd_problems(wrong) != [None]


MONITOR_KEYS = {"port", "interval"}


@pytest.mark.parametrize(("value_set", "kind"), [("hpa", "ServiceMonitor"), ("keda", "PodMonitor")])
def test_monitors_have_known_keys_only(value_set: str, kind: str) -> None:
    """The models of the CRDs let unknown keys pass."""
    (monitor,) = (m for m in manifests_of(value_set) if m["kind"] == kind)
    endpoints = "endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"
    assert set(monitor["spec"]) == {"selector", endpoints}
    assert all(set(endpoint) <= MONITOR_KEYS for endpoint in monitor["spec"][endpoints])


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_names_are_unique_and_all_objects_are_in_the_namespace_of_the_release(value_set: str) -> None:
    own = [m for m in manifests_of(value_set) if "app.kubernetes.io/name" in m["metadata"].get("labels", {})]
    assert all(m["metadata"]["namespace"] == "prod" for m in own)
    identities = [(m["kind"], m["metadata"]["name"]) for m in own]
    assert len(identities) == len(set(identities))
