"""The pod of the chart as `podman kube play` takes it, without a cluster: `python -m tools.podman_pod > pod.yaml`.

The rendered Deployment's pod and the ConfigMaps that it mounts, in the network of the host. What podman does not know
is left out: gRPC probes, values from the resources of a container, spread over nodes, service accounts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from tools.render_chart import Manifest, render

_UNKNOWN_TO_PODMAN = ("serviceAccountName", "topologySpreadConstraints")
_UNKNOWN_IN_CONTAINERS = ("ports", "startupProbe", "readinessProbe", "livenessProbe")
_INIT_CONTAINERS_RUN = {"io.podman.annotations.init.container.type": "always"}
_HERE = {"hostNetwork": True, "restartPolicy": "Never"}  # else podman starts init containers again and again


def podman_pod(values: dict[str, Any], name: str) -> list[Manifest]:
    """ConfigMaps and the pod. Raises helm_python's HelmError."""
    manifests = render(values)
    (deployment,) = (manifest for manifest in manifests if manifest["kind"] == "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    mounted = {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume}
    config_maps = [m for m in manifests if m["kind"] == "ConfigMap" and m["metadata"]["name"] in mounted]
    spec = {key: value for key, value in spec.items() if key not in _UNKNOWN_TO_PODMAN} | _HERE
    for kind in ("initContainers", "containers"):
        spec[kind] = [_known_to_podman(container) for container in spec.get(kind, [])]
    metadata = {"name": name, "annotations": _INIT_CONTAINERS_RUN}
    return [*config_maps, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}]


def _known_to_podman(container: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in container.items() if key not in _UNKNOWN_IN_CONTAINERS}
    return kept | {"env": [variable for variable in container.get("env", []) if "value" in variable]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the chart's pod for `podman kube play`.")
    parser.add_argument("--values", type=Path, action="append", default=[], help="values; may be repeated")
    parser.add_argument("--name", default="slipstream")
    arguments = parser.parse_args()
    values: dict[str, Any] = {}
    for path in arguments.values:
        values |= yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    yaml.safe_dump_all(podman_pod(values, arguments.name), sys.stdout, sort_keys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
