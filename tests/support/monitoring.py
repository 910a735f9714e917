"""The dashboards and rules as checked in, and what their PromQL reads: for the tests of tests/deploy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yaml"))
RULE_TESTS = sorted((DEPLOY / "prometheus" / "tests").glob("*.yaml"))

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool (Debian package prometheus)",
)

# What Grafana would put in: all of everything, and a window that holds the whole run of a test.
_VARIABLES = {
    "$__rate_interval": "5m",
    "$__range": "5m",
    "$namespace": ".*",
    "$model": ".*",
    "$method": ".*",
    "$instance": ".*",
}


@dataclass(frozen=True)
class PanelQuery:
    """One query of one panel, its variables replaced."""

    dashboard: str  # file name without .json
    panel: str
    expression: str

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel}: {self.expression}"


def load_dashboard(path: Path) -> dict[str, Any]:
    """A dashboard as JSON."""
    dashboard: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return dashboard


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_queries() -> Iterator[PanelQuery]:
    """Every query of every dashboard."""
    for path in DASHBOARDS:
        for panel in panels(load_dashboard(path)):
            for target in panel["targets"]:
                yield PanelQuery(path.stem, panel["title"], replace_variables(target["expr"]))


def replace_variables(expression: str) -> str:
    """PromQL that Prometheus takes."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def rules() -> list[dict[str, Any]]:
    """Every recording and alerting rule."""
    documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in RULES]
    return [rule for document in documents for group in document["groups"] for rule in group["rules"]]


def metrics_of(expression: str) -> set[str]:
    """Names of the series that a PromQL expression reads. Raises ValueError where it is no PromQL."""
    names: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector) and node.name:
            names.add(node.name)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return names
