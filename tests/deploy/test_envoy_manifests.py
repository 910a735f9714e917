"""Envoy in a cluster: its manifests are valid, and agree with its configuration, the chart and the server."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from server.health import READINESS_NAMES
from tests.support.helm_chart import Manifest, find, render
from tests.support.monitoring import DEPLOY

ENVOY = DEPLOY / "envoy"
CONFIG: dict[str, Any] = yaml.safe_load((ENVOY / "envoy.yaml").read_text(encoding="utf-8"))
MANIFESTS: list[Manifest] = list(yaml.safe_load_all((ENVOY / "kubernetes.yaml").read_text(encoding="utf-8")))
CLUSTERS: list[dict[str, Any]] = CONFIG["static_resources"]["clusters"]


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = find(MANIFESTS, "Deployment")["spec"]["template"]["spec"]
    return spec


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


@pytest.mark.parametrize("version", ["1.36", "1.30"])
def test_kubernetes_accepts_the_manifests(version: str) -> None:
    for manifest in MANIFESTS:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_ports_are_those_of_the_configuration() -> None:
    (container,) = pod()["containers"]
    (listener,) = CONFIG["static_resources"]["listeners"]
    (port,) = container["ports"]
    assert port["containerPort"] == listener["address"]["socket_address"]["port_value"]
    assert find(MANIFESTS, "Service")["spec"]["ports"][0]["targetPort"] == port["name"]
    admin = CONFIG["admin"]["address"]["socket_address"]
    assert admin["address"] == "127.0.0.1"
    assert (
        f"/dev/tcp/127.0.0.1/{admin['port_value']}"
        in container["lifecycle"]["preStop"]["exec"]["command"][-1]
    )


def test_the_pod_mounts_what_kustomize_makes_of_the_configuration() -> None:
    kustomization = yaml.safe_load((ENVOY / "kustomization.yaml").read_text(encoding="utf-8"))
    (generator,) = kustomization["configMapGenerator"]
    (volume,) = pod()["volumes"]
    assert kustomization["resources"] == ["kubernetes.yaml"]
    assert generator == {"name": volume["configMap"]["name"], "files": ["envoy.yaml"]}


def test_services_and_budgets_select_the_pods() -> None:
    deployment = find(MANIFESTS, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        find(MANIFESTS, "Service")["spec"]["selector"],
        find(MANIFESTS, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ):
        assert selector == labels


def test_the_servers_are_those_of_a_release_named_slipstream_in_the_namespace_of_envoy() -> None:
    headless = find(render({"fullnameOverride": "slipstream"}), "Service", "-headless")
    (namespace,) = {manifest["metadata"]["namespace"] for manifest in MANIFESTS}
    for cluster in CLUSTERS:
        (locality,) = cluster["load_assignment"]["endpoints"]
        (host,) = locality["lb_endpoints"]
        address = host["endpoint"]["address"]["socket_address"]
        assert address["address"] == f"{headless['metadata']['name']}.{namespace}.svc.cluster.local"
        assert address["port_value"] == headless["spec"]["ports"][0]["port"]


def test_a_server_still_accepts_while_envoy_learns_that_it_drains() -> None:
    config = yaml.safe_load(find(render({}), "ConfigMap")["data"]["config.yaml"])
    for cluster in CLUSTERS:
        (check,) = cluster["health_checks"]
        assert check["grpc_health_check"]["service_name"] in READINESS_NAMES
        assert seconds(check["interval"]) + seconds(check["timeout"]) < config["drain-delay"]
        assert check["no_traffic_interval"] == check["interval"]


def test_an_envoy_has_time_to_drain() -> None:
    (container,) = pod()["containers"]
    sleep = container["lifecycle"]["preStop"]["exec"]["command"][-1].split("sleep ")[1]
    assert pod()["terminationGracePeriodSeconds"] > int(sleep)
