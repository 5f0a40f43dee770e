"""The dashboards' JSON: what Grafana needs of it. Their expressions are run in test_monitoring_live.py."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

from deploy.grafana import build

UNITS = {
    "none", "short", "percentunit", "s", "bytes", "Bps", "reqps",
    "suffix: tok", "suffix: tok/s", "suffix: /s", "suffix: x",
}  # fmt: skip
KINDS = {"row", "timeseries", "stat", "table", "state-timeline"}


@pytest.fixture(params=build.DASHBOARDS)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    path = build.DIRECTORY / request.param
    assert path.read_text() == build.text(request.param), "python -m deploy.grafana.build writes them anew"
    return json.loads(path.read_text())


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_it_can_be_imported(dashboard: dict[str, Any]) -> None:
    assert dashboard["schemaVersion"] >= 39 and dashboard["uid"] and dashboard["title"]
    assert "id" not in dashboard, "the id is given by the Grafana that imports it"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert {panel["type"] for panel in dashboard["panels"]} <= KINDS


def test_variables(dashboard: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "draft", "instance"], "those that others ask for come first"
    assert variables.pop("datasource")["type"] == "datasource"
    text = json.dumps(panels(dashboard))
    for name, variable in variables.items():
        assert variable["includeAll"] and variable["multi"] and variable["allValue"] == ".*"
        assert f'=~\\"${name}' in text, "a variable that nothing uses"
    for panel in panels(dashboard):
        for found in (panel, *panel["targets"]):
            assert found["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_every_panel_asks_something_and_says_in_what_unit(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        assert panel["targets"] and panel["title"], panel["id"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        named = [target["legendFormat"] for target in panel["targets"]]
        assert panel["type"] in ("stat", "table") or all(named), f"{panel['title']}: a line without a name"


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}

    for one, other in combinations(dashboard["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])
