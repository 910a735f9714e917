"""The generated parts of the chart are what `python -m tools.helm_chart` writes, and reach the cluster as they are."""

from __future__ import annotations

import json

import yaml

from tests.support.helm_chart import CHART, find, manifests_of, render_texts, values_of
from tools import helm_chart

MAX_CONFIGMAP_BYTES = 2**20


def test_readme_rules_and_dashboards_of_the_chart_are_up_to_date() -> None:
    assert helm_chart.stale() == [], "run `python -m tools.helm_chart`"


def test_a_value_is_described_by_the_comment_above_it() -> None:
    values = "# The first.\na: 1\nb:\n  # Two lines\n  # of text | more.\n  c: [x]\n  d: {}\n"
    assert helm_chart.values_table(values).splitlines()[2:] == [
        "| `a` | `1` | The first. |",
        '| `b.c` | `["x"]` | Two lines of text \\| more. |',
        "| `b.d` | `{}` |  |",
    ]


def test_the_rules_in_the_cluster_are_those_of_the_files() -> None:
    files = sorted((CHART / "files" / "rules").glob("*.yaml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    assert groups
    assert find(manifests_of("everything"), "PrometheusRule")["spec"]["groups"] == groups


def test_the_dashboards_in_the_cluster_are_those_of_the_files() -> None:
    files = sorted((CHART / "files" / "dashboards").glob("*.json"))
    assert files
    for file in files:
        config_map = find(manifests_of("everything"), "ConfigMap", f"-dashboard-{file.stem}")
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(config_map["data"][file.name]) == json.loads(file.read_text())
        assert len(config_map["data"][file.name].encode()) < MAX_CONFIGMAP_BYTES


def test_notes_say_how_to_reach_the_server() -> None:
    assert "helm -n prod test demo" in render_texts({})["NOTES.txt"]
    assert "demo-slipstream.prod.svc:50051" in render_texts({})["NOTES.txt"]


def test_notes_say_what_a_client_has_to_show() -> None:
    notes = render_texts(values_of("tls"))["NOTES.txt"]
    assert "(mutual TLS)" in notes
    assert "slipstream-tokens" in notes
    assert "slipstream generate" not in notes  # it would be refused
