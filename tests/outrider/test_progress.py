"""A bar where somebody watches, lines where somebody reads later."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios

import pytest

from outrider import progress
from outrider.progress import Progress

LOADING = """
import logging
from outrider.progress import Progress

logging.basicConfig(level="INFO")
with Progress("Loading", 3_000_000) as progress:
    for _ in range(3):
        progress.update(1_000_000)
"""


def test_a_bar_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    subprocess.run([sys.executable, "-c", LOADING], stderr=theirs, check=True, timeout=60)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert "0.00/3.00M" in shown and "B/s" in shown and "INFO" not in shown


def test_a_line_in_a_log() -> None:
    run = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=True, timeout=60)
    assert run.stderr.startswith("INFO:outrider.progress:Loading: 3.00MB of 3.00MB after ")
    assert run.stderr.count("\n") == 1 and "\r" not in run.stderr


def test_a_log_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter((100.0, 104.0, 111.0, 111.0, 112.0, 112.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with caplog.at_level("INFO"), Progress("K = 2", 3, unit="request") as requests:
        for _ in range(3):
            requests.update()
        requests.close()
    assert caplog.messages == ["K = 2: 2 of 3 after 11.0 s", "K = 2: 3 of 3 after 12.0 s"]
