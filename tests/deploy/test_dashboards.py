"""The dashboards: made by the code, well formed for Grafana, and about metrics that the server has."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from server.interceptors import CallInterceptor
from server.metrics import Metrics
from tests.support.monitoring import (
    DASHBOARDS,
    DEPLOY,
    load_dashboard,
    metrics_of,
    panel_queries,
    panels,
    rules,
)

ROOT = DEPLOY.parent
GRID_COLUMNS = 24
MADE_BY_PROMETHEUS = {"ALERTS"}
every_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def served_series() -> set[str]:
    """Names of all series that a server can show, such as those of a histogram."""
    registry = CollectorRegistry()
    Metrics(registry, "tiny", 4)
    CallInterceptor(registry)
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    families = [family for collector in registry._collector_to_names for family in collector.describe()]
    return {family.name + suffix for family in families for suffix in suffixes[family.type]}


def run_dashboards(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.dashboards", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_files_are_what_the_code_makes() -> None:
    result = run_dashboards("--check")
    assert result.returncode == 0, result.stderr
    assert [path.stem for path in DASHBOARDS] == ["fleet", "serving", "speculation"]


def test_check_tells_a_file_that_was_edited_or_is_missing(tmp_path: Path) -> None:
    assert run_dashboards("--folder", str(tmp_path)).returncode == 0
    assert run_dashboards("--folder", str(tmp_path), "--check").returncode == 0
    (tmp_path / "fleet.json").write_text("{}", encoding="utf-8")
    (tmp_path / "serving.json").unlink()
    result = run_dashboards("--folder", str(tmp_path), "--check")
    assert result.returncode == 1
    assert "serving.json, fleet.json" in result.stderr


def test_every_query_is_promql_about_metrics_that_the_server_has() -> None:
    known = served_series() | MADE_BY_PROMETHEUS
    for query in panel_queries():
        assert metrics_of(query.expression) <= known, query


def test_every_rule_is_about_metrics_that_the_server_has_or_a_rule_records() -> None:
    known = served_series() | {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        assert metrics_of(rule["expr"]) <= known, rule


def test_every_metric_of_the_server_is_on_a_dashboard() -> None:
    shown = set().union(*(metrics_of(query.expression) for query in panel_queries()))
    without_suffix = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    missing = {re.sub("_(bucket|sum|count)$", "", name) for name in served_series()} - without_suffix
    assert (
        missing
        == {
            "grpc_server_handling_seconds",  # the engine's own latencies say more
            "grpc_server_started_total",  # handled_total counts the same calls
            "slipstream_spec_decode_verifier_accepted_tokens_total",  # for tests of drafters: counts before the cut
        }
    )


@every_dashboard
def test_every_panel_explains_itself(path: Path) -> None:
    for panel in panels(load_dashboard(path)):
        title = panel["title"]
        assert panel["description"].endswith((".", ")", ")."))
        assert panel["targets"], title
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), title
        assert has_unit(panel), title
        for target in [panel, *panel["targets"]]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, title


def has_unit(panel: dict[str, Any]) -> bool:
    """A table has one per column."""
    config = panel["fieldConfig"]
    if panel["type"] != "table":
        return bool(config["defaults"]["unit"])
    units = [p for override in config["overrides"] for p in override["properties"] if p["id"] == "unit"]
    return len(units) == len(panel["targets"])


@every_dashboard
def test_every_query_is_filtered_by_the_variables_and_has_grafana_s_window(path: Path) -> None:
    for panel in panels(load_dashboard(path)):
        for target in panel["targets"]:
            expression = target["expr"]
            selectors = re.findall(r"\w+\{([^}]*)\}", expression)
            assert selectors, expression
            for selector in selectors:
                assert 'namespace=~"$namespace"' in selector, expression
                assert "$instance" in selector or "alertname" in selector, expression
            assert set(re.findall(r"\[([^\]]+)\]", expression)) <= {"$__rate_interval", "$__range"}


@every_dashboard
def test_panels_have_ids_and_do_not_overlap(path: Path) -> None:
    everything = load_dashboard(path)["panels"]
    assert [panel["id"] for panel in everything] == list(range(1, len(everything) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        grid = panel["gridPos"]
        columns = range(grid["x"], grid["x"] + grid["w"])
        cells = set(itertools.product(columns, range(grid["y"], grid["y"] + grid["h"])))
        assert columns.stop <= GRID_COLUMNS, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


@every_dashboard
def test_the_dashboard_can_be_imported_and_leads_to_the_others(path: Path) -> None:
    dashboard = load_dashboard(path)
    assert dashboard.get("id") is None
    assert dashboard["uid"] == f"slipstream-{path.stem}"
    assert dashboard["tags"] == dashboard["links"][0]["tags"] == ["slipstream"]
    assert dashboard["links"][0]["includeVars"] is dashboard["links"][0]["keepTime"] is True
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    methods = ["method"] if path.stem == "speculation" else []
    assert names == ["datasource", "namespace", "model", *methods, "instance"]


def test_grafana_is_provisioned_with_the_data_source_and_the_folder() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "slipstream.yaml").read_text())["providers"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
