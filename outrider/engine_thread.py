"""One thread that runs an engine: commands come in from the event loop, results go back to it.

The engine never touches grpc objects; the event loop never touches tensors.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Command = TypeVar("Command")

log = logging.getLogger(__name__)

# A thread that is busy in Python holds the loop up by the switch interval, 5 ms by default (measured: a round trip's
# p50 falls from 5.4 to 0.25 ms).
SWITCH_INTERVAL = 5e-5


class Engine(Protocol[Command]):
    """What the thread drives. All methods run in the engine thread only."""

    def apply(self, commands: list[Command]) -> None:
        """Takes commands in, in order. Must not raise for a bad command: it fails that sequence alone."""

    def idle_seconds(self) -> float | None:
        """How long to wait for commands before the next step: 0 to step at once, None until a command arrives."""

    def step(self) -> None:
        """One step of work. An exception is a bug: it is logged and handed to `on_failure`."""

    def on_failure(self, error: Exception) -> None:
        """A step raised. The engine ends the sequences that took part, and goes on."""


class EngineThread(Generic[Command]):
    """Drives an Engine until it is stopped."""

    def __init__(self, engine: Engine[Command], name: str, prepare: Callable[[], None] = lambda: None) -> None:
        """`prepare` is called in the thread, before anything else."""
        self._engine = engine
        self._prepare = prepare
        self._inbox: queue.SimpleQueue[tuple[Command, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; results are delivered to `loop`."""
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._loop = loop
        self._thread.start()

    def submit(self, *commands: Command) -> None:
        """Hands commands to the engine, those of one call together; from any thread, never blocks."""
        self._inbox.put(commands)

    def deliver(self, callback: Callable[..., object], *args: object) -> None:
        """Called by the engine: runs `callback(*args)` on the event loop."""
        assert self._loop is not None, "deliver before start"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def stop(self, timeout: float = 5.0) -> None:
        """Lets the running step finish, then ends the thread."""
        self._inbox.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        self._prepare()
        while True:
            commands, stopping = self._take(self._engine.idle_seconds())
            if stopping:
                return
            try:
                if commands:
                    self._engine.apply(commands)
                self._engine.step()
            except Exception as error:
                log.exception("engine step failed")
                self._engine.on_failure(error)

    def _take(self, wait: float | None) -> tuple[list[Command], bool]:
        """All waiting commands; waits at most `wait` seconds for the first."""
        commands: list[Command] = []
        try:
            item = self._inbox.get_nowait() if wait == 0 else self._inbox.get(timeout=wait)
            while item is not None:
                commands.extend(item)
                item = self._inbox.get_nowait()
            return commands, True
        except queue.Empty:
            return commands, False
