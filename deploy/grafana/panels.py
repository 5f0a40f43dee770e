"""Dashboards as short tables of panels, written as Grafana's JSON.

The JSON follows schema version 39, which Grafana 10.4 and later read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 39
WIDTH = 24  # of Grafana's grid
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

# Selectors of the variables, to stand within braces.
HERE = 'instance=~"$instance"'
MODEL = f'model_name=~"$model", {HERE}'
DRAFT = f'{MODEL}, draft_model=~"$draft"'
# Targets and drafts have series of the same names as gateways, which alone have peers.
OF_GATEWAY = "and on (instance) outrider_peer_available"

VARIABLES = {
    "model": ("Model", "label_values(outrider_num_requests_running, model_name)"),
    "draft": ("Draft", 'label_values(outrider_spec_decode_num_drafts_total{model_name=~"$model"}, draft_model)'),
    "instance": ("Instance", "label_values(outrider_build_info, instance)"),
}


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` are pairs of an expression and the name of its series in the legend."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    text: str = ""  # what it means, for the reader who hovers over its title
    kind: str = "timeseries"  # or stat, table, state-timeline
    width: int = 8
    height: int = 8
    stack: bool = False
    most: float | None = None  # the upper end of the axis
    bad_above: float | None = None  # of a stat
    bad_below: float | None = None
    no_value: str = "no traffic"


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Dashboard:
    """`uid` is part of its address in Grafana, and of links to it."""

    uid: str
    title: str
    text: str
    rows: Sequence[Row] = field(default_factory=tuple)

    def model(self) -> dict[str, Any]:
        """Grafana's JSON."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.text,
            "tags": ["outrider"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": [
                {"title": "Outrider", "type": "dashboards", "tags": ["outrider"], "asDropdown": False, "keepTime": True}
                | {"includeVars": True}
            ],
            "templating": {"list": list(_variables())},
            "panels": list(_placed(self.rows)),
        }


def quantiles(family: str, labels: str, *values: float, by: str = "") -> list[tuple[str, str]]:
    """Queries for quantiles of a histogram; `by` names one more label to keep."""
    keep, prefix = (f"le, {by}", f"{{{{{by}}}}} ") if by else ("le", "")
    return [
        (
            f"histogram_quantile({value:g}, sum by ({keep}) (rate({family}_bucket{{{labels}}}[$__rate_interval])))",
            f"{prefix}p{value * 100:g}",
        )
        for value in values
    ]


def rate(counter: str, labels: str, by: str = "") -> str:
    """The sum of a counter's rates."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({counter}{{{labels}}}[$__rate_interval]))"


def ratio(above: str, below: str) -> str:
    """A quotient that has no value, rather than NaN, where there was nothing to divide by."""
    return f"{above} / ({below} > 0)"


def mean(family: str, labels: str, by: str = "") -> str:
    """The mean of a histogram's observations."""
    return ratio(rate(f"{family}_sum", labels, by), rate(f"{family}_count", labels, by))


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}
    for name, (label, query) in VARIABLES.items():
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": DATASOURCE,
            "definition": query,
            "query": {"qryType": 1, "query": query, "refId": name},
            "refresh": 2,  # when the time range changes
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


def _placed(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """All panels with ids and places: from left to right, in as many lines as a row needs."""
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": []} | _at(0, y, WIDTH, 1)
        y, x, tallest = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            number += 1
            yield {"id": number} | _panel(panel) | _at(x, y, panel.width, panel.height)
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest


def _at(x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    instant = panel.kind in ("stat", "table")
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            | ({"instant": True, "range": False} if instant else {"instant": False, "range": True})
            | ({"format": "table"} if panel.kind == "table" else {})
            for index, (expression, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
    } | _options(panel)


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "noValue": panel.no_value}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stack else "none", "group": "A"}
        fill = 40 if panel.stack else 0
        defaults |= {"min": 0, "custom": {"lineWidth": 1, "fillOpacity": fill, "stacking": stacking}}
    if panel.kind == "state-timeline":
        down, up = {"text": "down", "color": "red"}, {"text": "up", "color": "green"}
        defaults["mappings"] = [{"type": "value", "options": {"0": down, "1": up}}]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bad_above is not None:
        steps.append({"color": "red", "value": panel.bad_above})
    if panel.bad_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.bad_below}]
    return defaults | {"thresholds": {"mode": "absolute", "steps": steps}}


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {"options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "none"}}
    if panel.kind == "table":
        hidden = {"Time": True, "Value": True, "__name__": True, "job": True}
        return {"options": {}, "transformations": [{"id": "organize", "options": {"excludeByName": hidden}}]}
    if panel.kind == "state-timeline":
        return {"options": {"showValue": "never", "legend": {"displayMode": "list", "placement": "bottom"}}}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return {"options": {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}}
