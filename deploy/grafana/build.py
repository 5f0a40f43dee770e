"""Writes the dashboards: python -m deploy.grafana.build"""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana import operations, speculation

DIRECTORY = Path(__file__).parent
DASHBOARDS = {"operations.json": operations.DASHBOARD, "speculation.json": speculation.DASHBOARD}


def text(file: str) -> str:
    """What the file must contain."""
    return json.dumps(DASHBOARDS[file].model(), indent=2) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (DIRECTORY / name).write_text(text(name))
