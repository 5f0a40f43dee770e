"""Debian's Prometheus, started by a test and asked over its HTTP interface."""

from __future__ import annotations

import shutil

import pytest


def require(program: str) -> str:
    """The path of prometheus or promtool; the test is skipped where it is not installed."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed: apt-get install --no-install-recommends prometheus")
    return found
