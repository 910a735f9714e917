"""The chart's pod for podman: what the cluster would run, less what podman does not know."""

from __future__ import annotations

from tests.support.helm_chart import find, pod_spec, render
from tools.podman_pod import podman_pod

VALUES = {"image": {"tag": "0.1.0-cpu"}}


def test_containers_volumes_and_contexts_are_those_of_the_chart() -> None:
    rendered, played = pod_spec(render(VALUES)), find(podman_pod(VALUES, "p"), "Pod", "p")["spec"]
    for key in ("volumes", "securityContext", "terminationGracePeriodSeconds"):
        assert played[key] == rendered[key]
    for kind in ("initContainers", "containers"):
        assert len(played[kind]) == len(rendered[kind]) > 0
        for container, original in zip(played[kind], rendered[kind], strict=True):
            for key in ("image", "args", "securityContext", "resources", "volumeMounts"):
                assert container.get(key) == original.get(key)


def test_nothing_is_left_that_podman_refuses() -> None:
    pod = find(podman_pod(VALUES, "p"), "Pod", "p")["spec"]
    assert not {"serviceAccountName", "topologySpreadConstraints"} & set(pod)
    for container in pod["initContainers"] + pod["containers"]:
        assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & set(container)
        assert all("value" in variable for variable in container["env"])


def test_every_config_map_that_the_pod_mounts_comes_with_it() -> None:
    manifests = podman_pod(VALUES, "p")
    names = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "ConfigMap"}
    volumes = find(manifests, "Pod", "p")["spec"]["volumes"]
    assert {volume["configMap"]["name"] for volume in volumes if "configMap" in volume} == names
