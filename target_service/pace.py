"""When a step starts: at once, or a little later so that commands on their way make it into the same batch.

Half a batch costs almost a whole one where target and draft take turns on one device.
"""

from __future__ import annotations

from target_service.scheduler import IDLE_FIRST, Scheduler

# Of the last step's time.
WAIT_FRACTION = 0.15


class Pace:
    """Remembers how long the last step took and when waiting for the next began."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._last_step = 0.0
        self._ready_since: float | None = None

    def start(self, now: float) -> float | None:
        """When the next step may start, `now` or a little later; None where there is nothing to compute."""
        if not self._scheduler.has_work():
            self._ready_since = None
            return None
        if self._ready_since is None:
            self._ready_since = now
        return max(self._ready_since + WAIT_FRACTION * self._last_step, now) if self._expects_more(now) else now

    def stepped(self, seconds: float) -> None:
        """A step was made."""
        self._last_step = seconds
        self._ready_since = None

    def _expects_more(self, now: float) -> bool:
        """Whether a command is on its way: some sequence was answered not long ago."""
        return any(
            sequence.idle_since is not None and now - sequence.idle_since < IDLE_FIRST
            for sequence in self._scheduler.active
        )
