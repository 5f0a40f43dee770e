"""The client's side of a held stream: what is to be written gathers in the next message while the last one is written.

One task reads and only dispatches, one task writes and only drains; neither waits for the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import grpc

from outrider.channels import FULL_MESSAGE_BYTES

Request = TypeVar("Request")
Response = TypeVar("Response")

log = logging.getLogger(__name__)


Call = tuple[Callable[..., object], tuple[object, ...]]
_later: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[Call]] = WeakKeyDictionary()
# Of so many calls that wait, two a turn: what gathers for longer than a round must not gather without end.
_MANY = 256


def after_writes(callback: Callable[..., object], *args: object) -> None:
    """Calls back once the writers that are ready have had their turn: for work that need not delay a round.

    In order, one call a turn of the loop, so that an answer that arrives meanwhile does not wait for all of them.
    """
    loop = asyncio.get_running_loop()
    calls = _later.setdefault(loop, deque())
    calls.append((callback, args))
    if len(calls) == 1:
        loop.call_soon(loop.call_soon, _call_next, loop, calls)


def _call_next(loop: asyncio.AbstractEventLoop, calls: deque[Call]) -> None:
    for _ in range(1 + len(calls) // _MANY):
        callback, args = calls.popleft()
        loop.call_soon(callback, *args)
    if calls:
        loop.call_soon(_call_next, loop, calls)


class HeldStream(Generic[Request, Response]):
    """A bidirectional call. `on_response` gets each message, `on_end` why it ended; neither is called after close."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Any, Any],
        new_request: Callable[[], Request],
        on_response: Callable[[Response], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._call = call
        self._new_request = new_request
        self._on_response = on_response
        self._on_end = on_end
        self._messages: deque[Request] = deque()
        self._last_bytes = 0
        self._ready = asyncio.Event()
        self.writing_since: float | None = None
        self.alive = True
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._write())]

    def message(self, num_bytes: int = 0) -> Request:
        """The message to add commands to, `num_bytes` of payload among them; it is written in the next turn."""
        if not self._messages or self._last_bytes > FULL_MESSAGE_BYTES:
            self._messages.append(self._new_request())
            self._last_bytes = 0
        self._last_bytes += num_bytes
        self._ready.set()
        return self._messages[-1]

    def close(self) -> None:
        """Ends the call at once; the other side frees what it held."""
        self._finish()

    async def _write(self) -> None:
        try:
            while await self._ready.wait():
                message = self._messages.popleft()
                if not self._messages:
                    self._ready.clear()
                self.writing_since = self._now()
                await self._call.write(message)
                self.writing_since = None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader is told why

    async def _read(self) -> None:
        reason = "the peer ended it"
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._on_response(cast(Response, response))
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            if not self.alive:
                raise
            reason = "cancelled"
        except Exception as error:
            log.exception("a message of a held stream could not be taken in")
            reason = f"{type(error).__name__}: {error}"
        if self.alive:
            self._finish()
            self._on_end(reason)

    def _finish(self) -> None:
        if self.alive:
            self.alive = False
            self._call.cancel()
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
