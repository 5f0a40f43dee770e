"""When a step starts: at once, or a little later so that commands on their way make it into the same batch.

Half a batch costs almost a whole one where target and draft take turns on one device. Sequences that have fallen out of
step with the others stay so by themselves: each group is verified while the other is drafted for.
"""

from __future__ import annotations

from target_service.scheduler import Scheduler

# Of the last step's time: what a large group takes to come back, its chains drafted, is a fifth to a quarter of it.
WAIT_FRACTION = 1 / 3


class Pace:
    """Remembers how long the last step took and since when the next could have started."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._longest_wait = 0.0
        self._ready_since: float | None = None

    def start(self, now: float) -> float | None:
        """When the next step may start, `now` or a little later; None where there is nothing to compute."""
        if not self._scheduler.has_work():
            self._ready_since = None
            return None
        if self._ready_since is None:
            self._ready_since = now
        deadline = self._ready_since + self._longest_wait
        return deadline if now < deadline and self._expects_more(now, deadline) else now

    def stepped(self, seconds: float, *, with_prompts: bool = False) -> None:
        """A step was made. One with prompts is long, and says less of how long the others take: half of it counts."""
        self._longest_wait = WAIT_FRACTION * (seconds / 2 if with_prompts else seconds)
        self._ready_since = None

    def _expects_more(self, now: float, deadline: float) -> bool:
        """Whether a caller, by the time it took for its last command, will be here by then, and is not long overdue."""
        overdue = now - self._longest_wait
        return any(
            sequence.idle_since is not None and overdue <= sequence.idle_since + sequence.turnaround <= deadline
            for sequence in self._scheduler.active
        )
