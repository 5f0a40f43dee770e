"""Signals before a service can drain or read anything again."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def take_early_signals() -> None:
    """SIGTERM ends the process with exit code 0, also as the first of a container, where it would do nothing.

    SIGHUP does nothing: what it has read again is read at the start anyway. ServiceFrame takes both over.
    """
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
