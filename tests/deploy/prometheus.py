"""Debian's Prometheus, started by a test and asked over its HTTP interface."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

INTERVAL = "300ms"  # between two scrapes, and between two evaluations
WINDOW = "3s"  # of rates
LIMITS = {  # of alerts, in seconds
    "request_queue_time_seconds:mean_rate5m > 10": "request_queue_time_seconds:mean_rate5m > 0.5",
    "verify_seconds:p90_rate5m > 0.5": "verify_seconds:p90_rate5m > 0.1",
}

Sample = tuple[dict[str, str], float]


def require(program: str) -> str:
    """The path of prometheus or promtool; the test is skipped where it is not installed."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed: apt-get install --no-install-recommends prometheus")
    return found


def quick(rules: str) -> str:
    """The same rules with all their times shortened: windows, `for`, and how long a queue or a step may be."""
    rules = re.sub(r"\[\d+m\]", f"[{WINDOW}]", rules)
    rules = re.sub(r"\bfor: \d+m\b", "for: 600ms", rules)
    for limit, shorter in LIMITS.items():
        assert limit in rules, limit
        rules = rules.replace(limit, shorter)
    return rules


class Prometheus:
    """A Prometheus of its own, in `directory`; `targets` are metrics addresses by the name of their job."""

    def __init__(self, directory: Path, rules: str, targets: Mapping[str, str]) -> None:
        directory.mkdir()
        (directory / "rules.yaml").write_text(rules)
        jobs = [{"job_name": job, "static_configs": [{"targets": [at]}]} for job, at in targets.items()]
        times = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
        config = {"global": times, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.fired: set[str] = set()  # alerts that were ever found to fire
        self._log = directory / "log"
        self.address = f"127.0.0.1:{_free_port()}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    require("prometheus"),
                    f"--config.file={directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address={self.address}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def query(self, expression: str) -> list[Sample]:
        """The samples of an expression now. Raises AssertionError with what Prometheus says of a wrong one."""
        url = f"http://{self.address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            answer: Any = json.load(urllib.request.urlopen(url, timeout=60))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        return [(sample["metric"], float(sample["value"][1])) for sample in answer["data"]["result"]]

    def has(self, expression: str) -> bool:
        """Whether the expression has any value that is a number."""
        return any(value == value for _, value in self.query(expression))

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """The labels of the alerts that fire, by name."""
        alerts: dict[str, list[dict[str, str]]] = {}
        for labels, _ in self.query('ALERTS{alertstate="firing"}'):
            alerts.setdefault(labels["alertname"], []).append(labels)
        self.fired |= alerts.keys()
        return alerts

    def wait_ready(self, seconds: float = 100) -> None:
        """Returns once it is ready."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5).close()
                return
            except OSError:  # nobody listens yet, or it answers 503
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise AssertionError(f"prometheus does not answer:\n{self._log.read_text()}") from None
                time.sleep(0.1)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(60)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
