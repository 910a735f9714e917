"""Who reaches the pods of the chart, and whom they reach: Services, routes, network policy."""

from __future__ import annotations

from typing import Any

import pytest

from server.gateway_vllm import DESCRIPTOR as GATEWAY_PROTOCOL
from tests.support.helm_chart import Manifest, find, manifests_of, render

POLICY = {"networkPolicy": {"enabled": True}}
ON_A_CLAIM = {"model": {"source": "volume", "volume": {"existingClaim": "models", "path": "llama"}}}
ADMIN = {"auth": {"tokensSecret": {"name": "tokens"}}, "admin": {"enabled": True, "service": True}}


def services(manifests: list[Manifest]) -> dict[str, list[str]]:
    """Names of the ports by that of the Service."""
    return {
        manifest["metadata"]["name"]: [port["name"] for port in manifest["spec"]["ports"]]
        for manifest in manifests
        if manifest["kind"] == "Service"
    }


def test_a_service_that_is_open_to_the_world_shows_it_no_metrics() -> None:
    manifests = manifests_of("everything")
    assert find(manifests, "Service", "llm")["spec"]["type"] == "LoadBalancer"
    assert services(manifests)["llm"] == ["grpc"]


@pytest.mark.parametrize("value_set", ["default", "everything"])
def test_each_pod_is_scraped_by_one_service(value_set: str) -> None:
    found = services(manifests_of(value_set))
    assert [name for name, ports in found.items() if "metrics" in ports] == [
        name for name in found if name.endswith("-metrics")
    ]


def ingress(values: dict[str, Any]) -> dict[str, Any]:
    """Peers by the name of the port."""
    spec = find(render(values), "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    return {rule["ports"][0]["port"]: rule["from"] for rule in spec["ingress"]}


def test_the_policy_lets_in_who_may_call_and_scrape() -> None:
    everybody: list[dict[str, Any]] = [{"namespaceSelector": {}}]
    namespace: list[dict[str, Any]] = [{"podSelector": {}}]
    assert ingress(POLICY) == {"grpc": namespace, "metrics": everybody}
    assert ingress(POLICY | ADMIN) == {"admin": namespace, "grpc": namespace, "metrics": everybody}


def test_no_peers_are_nobody() -> None:
    """A rule with an empty list of peers would let everybody in."""
    nobody = {"networkPolicy": {"enabled": True, "from": [], "adminFrom": []}}
    assert set(ingress(nobody | ADMIN)) == {"metrics"}
    nobody["networkPolicy"]["metricsFrom"] = []
    assert ingress(nobody) == {}


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ({}, {443}),
        (ON_A_CLAIM, set()),
        ({**ON_A_CLAIM, "speculators": [{"method": "eagle3", "model": "/models/head"}]}, set()),
        ({**ON_A_CLAIM, "speculators": [{"method": "eagle3", "model": "org/head"}]}, {443}),
        ({**ON_A_CLAIM, "server": {"tokenizer": "org/tokenizer"}}, {443}),
        ({**ON_A_CLAIM, "server": {"trace-endpoint": "http://collector.traces:4318/v1/traces"}}, {4318}),
        ({**ON_A_CLAIM, "server": {"trace-endpoint": "https://collector/v1/traces"}}, {443}),
        ({**ON_A_CLAIM, "server": {"trace-endpoint": "http://collector/v1/traces"}}, {80}),
    ],
)
def test_the_policy_lets_out_what_the_configuration_calls(values: dict[str, Any], ports: set[int]) -> None:
    rules = find(render(POLICY | values), "NetworkPolicy")["spec"]["egress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == {53} | ports


def routed(server: dict[str, Any]) -> set[str]:
    values = {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}, "server": server}
    (rule,) = find(render(values), "GRPCRoute")["spec"]["rules"]
    return {match["method"]["service"] for match in rule["matches"]}


def test_the_protocol_of_gateways_is_routed_where_it_is_on_the_port_of_the_service() -> None:
    name = GATEWAY_PROTOCOL.full_name
    assert name not in routed({})
    assert name in routed({"gateway-protocol": "vllm"})
    assert name not in routed({"gateway-protocol": "vllm", "gateway-port": 50054})
