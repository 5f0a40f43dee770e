"""The one recovery: a sequence that its target lost is opened again, there or elsewhere, with all its tokens."""

from __future__ import annotations

import asyncio
import logging

from gateway.fleet import Fleet
from gateway.pairs import Target
from gateway.request import Request
from gateway.target_session import LOST, SequenceLost
from outrider.errors import DRAINING, QUEUE_FULL, Internal, ResourceExhausted, Unavailable

log = logging.getLogger(__name__)

MAX_LOSSES = 3  # in a row without a new token: a request that brings targets down is not replayed on all of them
_AVOID_SECONDS = 0.1  # a target that just refused, doubled at each refusal up to 1 s


class Recovery:
    """Where one request goes next. Reopening is tried for `within` seconds since the last token."""

    def __init__(self, request: Request, fleet: Fleet, within: float) -> None:
        self._request = request
        self._fleet = fleet
        self._within = within
        self._losses = 0
        self._refusals = 0
        self._deadline: float | None = None
        self._full: dict[Target, float] = {}  # until when a target is not asked again
        self._now = asyncio.get_running_loop().time

    def progressed(self) -> None:
        """A new token: what went wrong before it is forgotten."""
        self._losses = self._refusals = 0
        self._deadline = None
        self._full.clear()

    def after(self, loss: SequenceLost, target: Target) -> None:
        """Takes note of a loss. Raises Internal after the third in a row, ResourceExhausted when all are full."""
        log.info("request %s: %s: %s", self._request.origin.request_id, target.address, loss)
        self._request.metrics.recovery(loss.reason)
        self._request.phase = "recovering"
        if self._deadline is None:
            self._deadline = self._now() + self._within
        if loss.reason == LOST:
            self._losses += 1
            if self._losses >= MAX_LOSSES:
                raise Internal(f"its target was lost {self._losses} times in a row without a new token", "TARGET_LOST")
        if loss.reason in (QUEUE_FULL, DRAINING):
            self._refusals += 1
            self._full[target] = self._now() + min(_AVOID_SECONDS * 2 ** (self._refusals - 1), 1.0)
        if loss.reason == QUEUE_FULL and self._request.num_delivered == 0:
            others = self._fleet.available_targets(self._request.model.model)
            if all(other in self._full for other in others):
                raise ResourceExhausted("the queue of every target is full", QUEUE_FULL)

    async def find_target(self) -> Target:
        """The least busy target that may be asked. Raises Unavailable when there is none within the time."""
        while True:
            changed = self._fleet.changed()
            now = self._now()
            avoided = [target for target, until in self._full.items() if until > now]
            target = self._fleet.choose_target(
                self._request.model, avoid=avoided, draft_model=self._request.admitted.draft_model
            )
            if target is not None:
                return target
            if self._deadline is None:
                self._deadline = now + self._within
            if now >= self._deadline:
                raise Unavailable(f"no target serves {self._request.model.model} within {self._within:g} s")
            wake_at = min([self._deadline, *(self._full[target] for target in avoided)])
            try:
                async with asyncio.timeout(max(wake_at - now, 0.001)):
                    await changed.wait()
            except TimeoutError:
                pass

    def leave_if_draining(self, target: Target) -> None:
        """Raises SequenceLost when the target drains and another can take the request over."""
        if not target.serving and self._fleet.choose_target(self._request.model, avoid=[target]) is not None:
            raise SequenceLost(DRAINING, "the request moves to another target")
