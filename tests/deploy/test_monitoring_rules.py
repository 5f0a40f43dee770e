"""The rules of deploy/prometheus: promtool accepts and tests them, and what an alert needs is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.prometheus import require

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
UNIT_TESTS = RULES.with_name("rules_test.yaml")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


@pytest.mark.parametrize(
    "command", [["check", "rules", RULES], ["test", "rules", UNIT_TESTS]], ids=["check", "unit tests"]
)
def test_promtool(command: list[Any]) -> None:
    done = subprocess.run([require("promtool"), *command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_unit_tested_firing_and_silent() -> None:
    cases = [
        case for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"] for case in test.get("alert_rule_test", [])
    ]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == ALERTS.keys()
    pending = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert pending == ALERTS.keys(), "each is silent before its time has passed"


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_it_means_and_has_its_runbook(name: str) -> None:
    annotations = ALERTS[name]["annotations"]
    assert annotations["summary"] and annotations["description"]
    assert ALERTS[name]["labels"]["severity"] in ("critical", "warning") and ALERTS[name]["for"]
    page = ROOT / annotations["runbook_url"]
    assert page.parent == ROOT / "docs" / "runbooks"
    assert page.read_text().startswith(f"# {name}\n")


def test_every_runbook_has_its_alert() -> None:
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "runbooks").glob("*.md")}
    assert pages == {alert["annotations"]["runbook_url"] for alert in ALERTS.values()}


def test_the_page_lists_every_alert() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    listed = dict(re.findall(r"^\| \[(\w+)\]\(([\w/.-]+)\) \|", page, re.MULTILINE))
    assert listed == {name: alert["annotations"]["runbook_url"].removeprefix("docs/") for name, alert in ALERTS.items()}
