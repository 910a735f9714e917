"""What the chart says agrees with the server: settings, ports, health names, times, metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.errors import ConfigError
from server.config import ENV_PREFIX, ServerConfig, load_config
from server.health import LIVENESS_NAME, READINESS_NAMES
from server.service import SERVICE_NAME
from tests.support.helm_chart import (
    CHART,
    VALUE_SETS,
    Manifest,
    find,
    manifests_of,
    pod_spec,
    render,
    server_container,
    values_of,
)
from tools.known_models import KNOWN_MODELS

ENGINE_STOP_SECONDS = 11  # flush twice for half a second, then at most 10 s for the engine process
METRICS_DOCUMENT = CHART.parent.parent.parent / "docs" / "metrics.md"


def server_config(manifests: list[Manifest], folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    """As the server reads it in the container: arguments, environment, file."""
    container = server_container(manifests)
    for variable in container["env"]:
        if variable["name"].startswith(ENV_PREFIX):
            monkeypatch.setenv(variable["name"], variable.get("value", "2"))  # a number of CPUs
    file = folder / "config.yaml"
    file.write_text(find(manifests, "ConfigMap", container_config_name(manifests))["data"]["config.yaml"])
    assert container["args"][:2] == ["serve", "--config=/etc/slipstream/config.yaml"]
    return load_config(dict(flag_and_value(argument) for argument in container["args"][2:]), file)


def container_config_name(manifests: list[Manifest]) -> str:
    (name,) = (
        volume["configMap"]["name"] for volume in pod_spec(manifests)["volumes"] if volume["name"] == "config"
    )
    assert isinstance(name, str)
    return name


def flag_and_value(argument: str) -> tuple[str, str]:
    flag, _, value = argument.partition("=")
    return flag.removeprefix("--").replace("-", "_"), value


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_the_server_accepts_its_configuration(
    value_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests, values = manifests_of(value_set), values_of(value_set)
    config = server_config(manifests, tmp_path, monkeypatch)
    wanted = values.get("speculators", [{"method": "ngram"}])
    assert [speculator.method for speculator in config.speculators] == [entry["method"] for entry in wanted]
    assert config.host == "0.0.0.0"
    for name, value in values.get("server", {}).items():
        given = load_config({"model": "m", name.replace("-", "_"): value})
        assert getattr(config, name.replace("-", "_")) == getattr(given, name.replace("-", "_"))


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_ports_and_probes_are_those_of_the_server(
    value_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = manifests_of(value_set)
    config, container = server_config(manifests, tmp_path, monkeypatch), server_container(manifests)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    given = {"grpc": config.port, "metrics": config.metrics_port}
    given |= {"health": config.health_port, "admin": config.admin_port}
    assert ports == {name: port for name, port in given.items() if port}
    probes = {name: container[f"{name}Probe"]["grpc"] for name in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {config.health_port or config.port}
    assert probes["startup"]["service"] == probes["readiness"]["service"]
    assert probes["readiness"]["service"] in READINESS_NAMES
    assert probes["liveness"]["service"] == LIVENESS_NAME


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_probes_need_neither_tls_nor_a_token(
    value_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = server_config(manifests_of(value_set), tmp_path, monkeypatch)
    assert (config.tls_cert is None) == (config.health_port == 0)


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_files_of_the_configuration_are_on_mounts(
    value_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = manifests_of(value_set)
    config, container = server_config(manifests, tmp_path, monkeypatch), server_container(manifests)
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume.get("secret", {}) for volume in pod_spec(manifests)["volumes"]}
    for file in (config.tls_cert, config.tls_key, config.tls_client_ca, config.auth_tokens):
        if file is not None:
            secret = volumes[mounts[str(file.parent)]]
            assert file.name in {item["path"] for item in secret.get("items", [{"path": file.name}])}
            assert not any(
                "subPath" in mount for mount in container["volumeMounts"]
            )  # it would not be renewed


def test_the_admin_service_is_on_the_loopback_address_unless_a_service_offers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, everything = manifests_of("tls"), manifests_of("everything")
    assert server_config(tls, tmp_path, monkeypatch).admin_host == "127.0.0.1"
    assert not [m for m in tls if m["kind"] == "Service" and m["metadata"]["name"].endswith("-admin")]
    assert server_config(everything, tmp_path, monkeypatch).admin_host == "0.0.0.0"
    service = find(everything, "Service", "-admin")
    assert service["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_no_secret_is_in_an_environment(value_set: str) -> None:
    pod = pod_spec(manifests_of(value_set))
    for container in pod["containers"] + pod.get("initContainers", []):
        assert not any("secretKeyRef" in e.get("valueFrom", {}) for e in container.get("env", []))


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_services_lead_to_ports_that_the_pod_has(value_set: str) -> None:
    manifests = manifests_of(value_set)
    pod = pod_spec(manifests)
    containers = pod["containers"] + pod.get("initContainers", [])
    ports = {port["name"]: port["containerPort"] for c in containers for port in c.get("ports", [])}
    for service in (manifest for manifest in manifests if manifest["kind"] == "Service"):
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == ports[port["targetPort"]]


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_a_pod_has_time_to_drain(value_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = manifests_of(value_set)
    config, container = server_config(manifests, tmp_path, monkeypatch), server_container(manifests)
    pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = pre_stop + config.drain_delay + config.grace + ENGINE_STOP_SECONDS
    assert pod_spec(manifests)["terminationGracePeriodSeconds"] > needed


def test_the_service_of_the_release_does_not_configure_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes' links to a Service called slipstream would be SLIPSTREAM_PORT=tcp://..., a setting of ours."""
    assert pod_spec(manifests_of("default"))["enableServiceLinks"] is False
    monkeypatch.setenv("SLIPSTREAM_PORT", "tcp://10.0.0.1:50051")
    with pytest.raises(ConfigError, match="port"):
        load_config({"model": "m"})


def test_every_setting_of_the_server_is_a_value_or_belongs_to_the_chart() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    open_settings = set(schema["properties"]["server"]["properties"])
    owned = {"model", "served-model-name", "revision", "speculators", "host", "port", "metrics-port"}
    owned |= {"drain-delay", "grace"}
    owned |= {
        "tls-cert",
        "tls-key",
        "tls-client-ca",
        "health-port",
        "auth-tokens",
        "admin-host",
        "admin-port",
    }
    settings = {name.replace("_", "-") for name in ServerConfig.model_fields}
    assert open_settings | owned == settings
    assert not open_settings & owned


def test_known_models_are_those_of_the_fetcher() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    names = schema["properties"]["model"]["properties"]["known"]["properties"]["name"]["enum"]
    assert set(names) == set(KNOWN_MODELS)
    assert all(model.file_name.endswith(".gguf") for model in KNOWN_MODELS.values())  # linked as NAME.gguf


def test_releases_that_share_a_cache_do_not_take_each_other_s_model() -> None:
    configs = []
    for name in KNOWN_MODELS:
        manifests = render({"model": {"known": {"name": name}}, "cache": {"existingClaim": "shared"}})
        file = find(manifests, "ConfigMap", container_config_name(manifests))["data"]["config.yaml"]
        configs.append(yaml.safe_load(file)["model"])
        (fetch,) = pod_spec(manifests)["initContainers"]
        cache = next(e["value"] for e in fetch["env"] if e["name"] == "SLIPSTREAM_CACHE")
        link = fetch["args"][0].split()[-1].strip('"')
        assert link.replace("$SLIPSTREAM_CACHE", cache).replace("$MODEL", name) == configs[-1]
    assert len(set(configs)) == len(KNOWN_MODELS)


def test_large_numbers_stay_whole() -> None:
    """Helm's own text of 2000000 is 2e+06, which the server refuses."""
    options = {"budget": 2_000_000, "share": 0.5, "name": "a b", "on": True}
    manifests = render({"speculators": [{"method": "suffix", "options": options}]})
    config = find(manifests, "ConfigMap", container_config_name(manifests))["data"]["config.yaml"]
    (speculator,) = yaml.safe_load(config)["speculators"]
    assert speculator["options"] == {"budget": "2000000", "share": "0.5", "name": "a b", "on": "true"}


def test_a_deployment_may_be_recreated() -> None:
    """Kubernetes takes no settings of rolling updates then; helm merges the defaults into what is given."""
    deployment = find(render({"strategy": {"type": "Recreate"}}), "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_routes_name_our_service() -> None:
    (rule,) = find(manifests_of("grpcroute"), "GRPCRoute")["spec"]["rules"]
    assert SERVICE_NAME in {match["method"]["service"] for match in rule["matches"]}


def metric_names(node: Any) -> set[str]:
    """Metrics of ours in any text of a manifest; of a histogram without the suffix of its series."""
    names = re.findall(r"\bslipstream_[a-z0-9_]+", yaml.safe_dump(node, width=10_000))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


@pytest.mark.parametrize(
    ("value_set", "kind"), [("keda", "ScaledObject"), ("hpa", "HorizontalPodAutoscaler")]
)
def test_autoscalers_ask_for_metrics_that_there_are(value_set: str, kind: str) -> None:
    documented = set(re.findall(r"`(slipstream_[a-z0-9_]+)`", METRICS_DOCUMENT.read_text()))
    adapter = yaml.safe_load((CHART / "examples" / "prometheus-adapter-values.yaml").read_text())
    made = {rule["name"]["as"] for rule in adapter["rules"]["custom"]} if kind != "ScaledObject" else set()
    wanted = metric_names(find(manifests_of(value_set), kind)["spec"])
    assert len(wanted) == 3
    assert wanted <= (made or documented)
    assert metric_names([rule["seriesQuery"] for rule in adapter["rules"]["custom"]]) <= documented


@pytest.mark.parametrize(
    ("pod", "is_own"),
    [
        ("demo-slipstream-6f9c7d5b8-x2k9q", True),
        ("demo-slipstream-6f9c7x2k9q", True),  # of a name so long that Kubernetes cuts the hash
        ("demo-slipstream-canary-6f9c7d5b8-x2k9q", False),
        ("demo-slipstream-envoy-6f9c7d5b8-x2k9q", False),
    ],
)
def test_keda_asks_for_the_pods_of_its_release_alone(pod: str, is_own: bool) -> None:
    triggers = find(manifests_of("keda"), "ScaledObject")["spec"]["triggers"]
    patterns = {match for t in triggers for match in re.findall('pod=~"([^"]+)"', t["metadata"]["query"])}
    (pattern,) = patterns
    assert bool(re.fullmatch(pattern, pod)) is is_own


def test_an_endpoint_picker_is_told_gauges_that_there_are() -> None:
    config = yaml.safe_load((CHART / "examples" / "endpoint-picker.yaml").read_text())
    (extractor,) = (plugin for plugin in config["plugins"] if plugin["type"] == "core-metrics-extractor")
    (engine,) = extractor["parameters"]["engineConfigs"]
    gauges = set(re.findall(r"`(slipstream_[a-z0-9_]+)` \| gauge", METRICS_DOCUMENT.read_text()))
    assert {value for key, value in engine.items() if key.endswith("Spec")} <= gauges
    assert extractor["parameters"]["defaultEngine"] == engine["name"]
    declared = {plugin["type"] for plugin in config["plugins"]}
    (profile,), (source,) = config["schedulingProfiles"], config["dataLayer"]["sources"]
    used = [*profile["plugins"], *config["requestHandler"]["parsers"], source, *source["extractors"]]
    assert {plugin["pluginRef"] for plugin in used} == declared


def test_an_autoscaler_owns_the_number_of_replicas() -> None:
    assert find(manifests_of("default"), "Deployment")["spec"]["replicas"] == 1
    for value_set in ("hpa", "keda"):
        assert "replicas" not in find(manifests_of(value_set), "Deployment")["spec"]


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_pods_run_without_privileges(value_set: str) -> None:
    manifests = manifests_of(value_set)
    test_pod = find(manifests, "Pod")["spec"]
    for pod in (pod_spec(manifests), test_pod):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"] + pod.get("initContainers", []):
            if container["name"] != "wait":  # a user's own
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_every_mount_has_its_volume(value_set: str) -> None:
    pod = pod_spec(manifests_of(value_set))
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {
        m["name"]
        for c in pod["containers"] + pod.get("initContainers", [])
        for m in c.get("volumeMounts", [])
    }
    assert mounts == volumes


def test_a_change_of_the_configuration_replaces_the_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = find(render(values), "Deployment")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum({}) != checksum({"server": {"max-num-seqs": 7}})
