"""A plugin of pytest, `-p deploy.gpt_oss.outcomes`: the outcomes so far, in a file that is written after every test."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

VARIABLE = "OUTRIDER_TEST_OUTCOMES"


class Outcomes:
    """Counts, and what failed how."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.monotonic()
        self._counts = {"passed": 0, "failed": 0, "skipped": 0}
        self._failures: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's call, or a setup or teardown that did not pass."""
        if report.when != "call" and report.passed:
            return
        self._counts[report.outcome] += 1
        if report.failed:
            self._failures.append({"test": report.nodeid, "why": report.longreprtext[-1500:]})
        found = {**self._counts, "seconds": time.monotonic() - self._began, "failures": self._failures}
        self._path.write_text(json.dumps(found, indent=1))


def pytest_configure(config: pytest.Config) -> None:
    """Not in the processes that run tests for another one, which hears of all of them."""
    if VARIABLE in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(os.environ[VARIABLE])))
