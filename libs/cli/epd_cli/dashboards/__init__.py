"""Grafana's dashboards, from which ``deploy/observability/dashboards`` is written.

A panel is a title, what it means, and its queries; where it stands and how Grafana wants to be told that is
worked out here. ``scripts/write_docs.py`` writes the files, and a test runs every query on a real Prometheus.
"""

from __future__ import annotations

import json
from typing import Any

from epd_cli.dashboards.faults import FAULTS
from epd_cli.dashboards.overview import OVERVIEW
from epd_cli.dashboards.panel import Panel
from epd_cli.dashboards.stages import STAGES
from epd_cli.dashboards.stores import STORES

__all__ = ["COLUMNS", "DASHBOARDS", "Panel", "dashboard"]

SOURCE = {"type": "prometheus", "uid": "prometheus"}
COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8}

DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": ("epdflow: overview", OVERVIEW),
    "stages": ("epdflow: a request's stages", STAGES),
    "stores": ("epdflow: stores", STORES),
    "faults": ("epdflow: faults", FAULTS),
}
"""Title and panels, by the file's name."""


def dashboard(name: str) -> str:
    """The JSON of one dashboard."""
    title, panels = DASHBOARDS[name]
    placed: list[dict[str, Any]] = []
    x = y = height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y, height = 0, y + height, 0
        placed.append(_panel(number, panel, x, y))
        x, height = x + panel.width, max(height, HEIGHTS[panel.kind])
    document = {
        "uid": f"epdflow-{name}",
        "title": title,
        "tags": ["epdflow"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "tags": ["epdflow"],
                "title": "epdflow",
                "asDropdown": False,
                "includeVars": False,
                "keepTime": True,
                "targetBlank": False,
            }
        ],
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": placed,
    }
    return json.dumps(document, indent=1) + "\n"


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHTS[panel.kind]},
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend or "__auto",
            }
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }
