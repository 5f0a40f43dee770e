"""Progress of something long: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 10.0  # between two lines of a log

log = logging.getLogger(__name__)


class Progress:
    """Counts up to `total`, of bytes unless `unit` says otherwise. Shown on standard error where that is a terminal.

    Elsewhere it is logged, every ten seconds and at the end: a bar that is drawn over and over makes a log unreadable.
    """

    def __init__(self, description: str, total: int, unit: str = "B") -> None:
        self.total = total
        self.done = 0
        self._description = description
        self._unit = unit
        self._closed = False
        self._began = time.monotonic()
        self._next_line = self._began + LINE_SECONDS
        # `disable` None: not where standard error is no terminal.
        self._bar: tqdm[Any] = tqdm(
            total=total, desc=description, unit=unit, unit_scale=unit == "B", leave=False, disable=None
        )

    def update(self, count: int = 1) -> None:
        """`count` more are done."""
        self.done += count
        self._bar.update(count)
        if self._bar.disable and time.monotonic() >= self._next_line:
            self._log()

    def close(self) -> None:
        """Takes the bar away, or logs how far it came. A second call does nothing."""
        if self._bar.disable and not self._closed:
            self._log()
        self._closed = True
        self._bar.close()

    def _log(self) -> None:
        now = time.monotonic()
        self._next_line = now + LINE_SECONDS
        done, total = self._amount(self.done), self._amount(self.total)
        log.info("%s: %s of %s after %.1f s", self._description, done, total, now - self._began)

    def _amount(self, count: int) -> str:
        return f"{tqdm.format_sizeof(count)}B" if self._unit == "B" else str(count)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
