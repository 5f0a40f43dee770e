"""One thread that runs an engine: commands come in from the event loop, results go back to it.

Commands can also come from sources that the thread itself watches, such as the socket of a pair.

The engine never touches grpc objects; the event loop never touches tensors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

Command = TypeVar("Command")

log = logging.getLogger(__name__)

# A thread that is busy in Python holds the loop up by the switch interval, 5 ms by default (measured: a round trip's
# p50 falls from 5.4 to 0.25 ms).
SWITCH_INTERVAL = 5e-5
# How long after the last command the next is looked for without sleep: a round of many sequences, and more. A thread
# that sleeps is woken late, and on a processor that has to wake up first.
_WATCH_SECONDS = 0.1
# Processors that leave one to each engine of a pair.
_ENOUGH_PROCESSORS = 4
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of the container, in microseconds of a period
# A look that takes longer waited for another thread's Python: that one gets the interpreter for a while.
_HELD_UP, _PAUSE = 3e-5, 3e-4


def watch_seconds(device: torch.device) -> float:
    """How long an engine that computes on `device` may look for commands without sleep: not where that costs others."""
    return _WATCH_SECONDS if device.type == "cuda" and _num_processors() >= _ENOUGH_PROCESSORS else 0.0


def _num_processors() -> float:
    """How many this process may keep busy: a container that is beyond its limit stands still for a while."""
    count = len(os.sched_getaffinity(0))
    try:
        limit, period = _CPU_LIMIT.read_text().split()
        return min(count, int(limit) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return count


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


class Source(Protocol[Command]):
    """Something that commands are read from, in the engine's thread."""

    @property
    def ended(self) -> bool:
        """Whether there will be no more. It is closed then."""

    def fileno(self) -> int:
        """Readable when there is something to read."""

    def read(self) -> list[Command]:
        """The commands that wait. Must not raise."""

    def close(self) -> None:
        """Gives the descriptor back."""


class EngineThread(Generic[Command]):
    """Drives an Engine until it is stopped."""

    def __init__(
        self,
        engine: Engine[Command],
        name: str,
        prepare: Callable[[], None] = lambda: None,
        watch_seconds: float = 0.0,
    ) -> None:
        """`prepare` is called in the thread, before anything else.

        `watch_seconds`: how long after a command, from the loop or a source, it looks for the next without sleep.
        """
        self._engine = engine
        self._prepare = prepare
        self._watch_seconds = watch_seconds
        self._watch_until = 0.0
        self._inbox: deque[tuple[Command, ...] | None] = deque()
        self._sources: dict[int, Source[Command]] = {}
        # Rung for what was put into the inbox.
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._readable = select.epoll()
        self._readable.register(self._doorbell, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; results are delivered to `loop`."""
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._loop = loop
        self._thread.start()

    def submit(self, *commands: Command) -> None:
        """Hands commands to the engine, those of one call together; from any thread, never blocks."""
        self._put(commands)

    def watch(self, source: Source[Command]) -> None:
        """Takes commands from a source, too, until it ends; from any thread."""
        self._sources[source.fileno()] = source
        self._readable.register(source.fileno(), select.EPOLLIN)

    def deliver(self, callback: Callable[..., object], *args: object) -> None:
        """Called by the engine: runs `callback(*args)` on the event loop."""
        assert self._loop is not None, "deliver before start"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def stop(self, timeout: float = 5.0) -> None:
        """Lets the running step finish, then ends the thread."""
        self._put(None)
        self._thread.join(timeout)

    def _put(self, commands: tuple[Command, ...] | None) -> None:
        self._inbox.append(commands)
        os.eventfd_write(self._doorbell, 1)

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
        """All waiting commands, and whether to stop; waits at most `wait` seconds for the first.

        Sources come first: what the event loop brings may answer what has come through them.
        """
        commands: list[Command] = []
        found = self._wait(wait)
        if found:
            self._watch_until = time.perf_counter() + self._watch_seconds
        for descriptor, _ in found:
            if descriptor == self._doorbell:
                os.eventfd_read(self._doorbell)
            else:
                commands += self._read(self._sources[descriptor])
        while self._inbox:
            item = self._inbox.popleft()
            if item is None:
                return commands, True
            commands.extend(item)
        return commands, False

    def _wait(self, seconds: float | None) -> list[tuple[int, int]]:
        """Which descriptors are readable, once one is."""
        if seconds != 0 and self._watch_seconds:
            began = time.perf_counter()
            if found := self._look(self._watch_until if seconds is None else min(self._watch_until, began + seconds)):
                return found
            if seconds is not None:
                seconds = max(0.0, began + seconds - time.perf_counter())
        if seconds:  # epoll itself waits for whole milliseconds
            select.select([self._readable], [], [], seconds)
        return self._readable.poll(None if seconds is None else 0)

    def _look(self, until: float) -> list[tuple[int, int]]:
        """The same without sleep; none of them if none is by then."""
        while (began := time.perf_counter()) < until:
            if found := self._readable.poll(0):
                return found
            if time.perf_counter() - began > _HELD_UP:
                select.select([self._readable], [], [], _PAUSE)
        return []

    def _read(self, source: Source[Command]) -> list[Command]:
        commands = source.read()
        if source.ended:
            self._readable.unregister(source.fileno())
            del self._sources[source.fileno()]
            source.close()
        return commands
