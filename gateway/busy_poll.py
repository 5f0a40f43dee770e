"""Waiting without sleep for the answers of rounds: a thread that sleeps for milliseconds is woken late."""

from __future__ import annotations

import asyncio

# After the last command; a step of many sequences is shorter.
SECONDS = 0.1


class BusyPoll:
    """Keeps the event loop turning for a while, which takes a processor and spares the loop's waking up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._until = 0.0
        self._turns = False

    def extend(self) -> None:
        """A step was asked for: no sleep for the next SECONDS."""
        self._until = self._loop.time() + SECONDS
        if not self._turns:
            self._turn()

    def _turn(self) -> None:
        self._turns = self._loop.time() < self._until
        if self._turns:
            self._loop.call_soon(self._turn)
