"""Writes the monitoring component's PrometheusRule out of Prometheus's own rule file, or checks that it is current.

kustomize cannot put a file into a field, and promtool reads no PrometheusRule.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
MANIFEST = DEPLOY / "kubernetes" / "components" / "monitoring" / "rules.yaml"
HEADER = "# Made from deploy/prometheus/rules.yaml by tools/kubernetes_rules.py.\n"


def manifest() -> str:
    """The PrometheusRule of the rules as they stand."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "outrider"},
        "spec": yaml.safe_load(RULES.read_text()),
    }
    return HEADER + yaml.safe_dump(rule, sort_keys=False, width=120)


def main() -> None:
    """Writes the file; with --check exits 1 where it is not what would be written."""
    if "--check" not in sys.argv[1:]:
        MANIFEST.write_text(manifest())
    elif MANIFEST.read_text() != manifest():
        sys.exit(f"{MANIFEST}: not what {RULES} makes; run python tools/kubernetes_rules.py")


if __name__ == "__main__":
    main()
