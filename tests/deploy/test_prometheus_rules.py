"""The rules by promtool: well formed, and every alert tested, with a runbook."""

from __future__ import annotations

import subprocess

import yaml

from tests.support.monitoring import DEPLOY, RULE_TESTS, RULES, needs_prometheus, rules

ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)


@needs_prometheus
def test_promtool_finds_no_fault_in_the_rules() -> None:
    result = promtool("check", "rules", *(str(path) for path in RULES))
    assert result.returncode == 0, result.stdout + result.stderr


@needs_prometheus
def test_promtool_finds_no_fault_in_the_configuration() -> None:
    result = promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yaml"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("rules found") == len(RULES)


@needs_prometheus
def test_alerts_fire_when_they_should_and_only_then() -> None:
    result = promtool("test", "rules", *(str(path) for path in RULE_TESTS))
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_tested_silent_and_firing() -> None:
    documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in RULE_TESTS]
    outcomes = {
        test["name"]: {
            bool(case["exp_alerts"]) for case in test["alert_rule_test"] if case["alertname"] == test["name"]
        }
        for document in documents
        for test in document["tests"]
    }
    assert outcomes == {name: {True, False} for name in ALERTS}


def test_every_alert_has_a_severity_a_text_and_a_runbook() -> None:
    headings = [
        line.removeprefix("### ")
        for line in (DEPLOY / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("### Slipstream")
    ]
    assert headings == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"deploy/README.md#{name.lower()}"
