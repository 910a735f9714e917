"""Wrong values are refused before anything is installed, with a message that names them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.support.helm_chart import CHART, helm, render_texts

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"replicaCount": "two"}, "replicaCount"),
    ({"replicas": 2}, "replicas"),
    ({"image": {"digest": "latest"}}, "image/digest"),
    ({"model": {"source": "s3"}}, "model/source"),
    ({"model": {"source": "hub"}}, "model/hub/id"),
    ({"model": {"source": "volume", "volume": {"existingClaim": "models"}}}, "model/volume/path"),
    ({"model": {"source": "image"}}, "model/image/path"),
    ({"model": {"known": {"name": "gpt"}}}, "model/known/name"),
    ({"speculators": [{"k": 4}]}, "method"),
    ({"speculators": [{"method": "ngram", "k": 0}]}, "speculators/0/k"),
    ({"speculators": ["ngram,k=4"]}, "speculators/0"),
    ({"server": {"max-num-seq": 8}}, "max-num-seq"),
    ({"server": {"max-num-seqs": "many"}}, "server/max-num-seqs"),
    ({"server": {"port": 1234}}, "port"),
    ({"server": {"grace": 5}}, "grace"),
    ({"server": {"kv-cache-memory": "lots"}}, "server/kv-cache-memory"),
    (
        {"server": {"gateway-protocol": "vllm", "gateway-port": 50052}},
        "server/gateway-port",
    ),  # the health port
    ({"server": {"max-connection-age": 1e10}}, "server/max-connection-age"),
    ({"gpu": {"count": -1}}, "gpu/count"),
    ({"drain": {"graceSeconds": "60s"}}, "drain/graceSeconds"),
    ({"service": {"port": 70000}}, "service/port"),
    ({"tls": {"enabled": True}}, "tls/secretName"),
    ({"tls": {"clientCaSecretName": "ca"}}, "tls/enabled"),
    ({"admin": {"enabled": True, "service": True}}, "auth/tokensSecret/name"),
    ({"server": {"auth-tokens": "/tokens"}}, "auth-tokens"),
    ({"cache": {"ephemeral": {"size": "big"}}}, "cache/ephemeral/size"),
    ({"grpcRoute": {"enabled": True}}, "grpcRoute/parentRefs"),
    ({"autoscaling": {"type": "both"}}, "autoscaling/type"),
    ({"autoscaling": {"type": "keda"}}, "autoscaling/keda/serverAddress"),
    ({"autoscaling": {"type": "hpa", "minReplicas": 0}}, "autoscaling/minReplicas"),
    ({"autoscaling": {"targets": {"kvCacheUsage": 85}}}, "autoscaling/targets/kvCacheUsage"),
    (  # a HorizontalPodAutoscaler without metrics would scale by CPU
        {"autoscaling": {"type": "hpa", "targets": {"requestsWaiting": None, "kvCacheUsage": None}}},
        "autoscaling/targets",
    ),
    ({"monitoring": {"monitor": "yes"}}, "monitoring/monitor"),
]


@pytest.mark.parametrize(("values", "named"), WRONG, ids=[named for _, named in WRONG])
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=re.escape(named)):
        render_texts(values)


def paths(node: Any, prefix: str = "") -> set[str]:
    """Paths of the keys below a mapping of values."""
    if not isinstance(node, dict):
        return set()
    found = {f"{prefix}{key}" for key in node}
    return found.union(*(paths(value, f"{prefix}{key}.") for key, value in node.items()))


def schema_paths(schema: dict[str, Any], node: dict[str, Any], prefix: str = "") -> set[str]:
    """Paths of the properties below a node of the schema."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
    properties = node.get("properties", {})
    found = {f"{prefix}{key}" for key in properties}
    return found.union(*(schema_paths(schema, value, f"{prefix}{key}.") for key, value in properties.items()))


def test_schema_and_values_have_the_same_keys() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    described = {path for path in schema_paths(schema, schema) if not path.startswith("server.")} - {
        "resources.claims"
    }
    given = paths(values)
    assert described - given == set()
    free_form = ("resources.", "podSecurityContext.", "securityContext.", "strategy.")
    unknown = {
        path for path in given - described if not path.startswith((*free_form, "autoscaling.behavior."))
    }
    assert unknown == set()
