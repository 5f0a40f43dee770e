"""The server side of a held stream: one task reads and only dispatches, one task writes and only drains.

A reader never awaits a write, so a peer that stops reading can never stop its own commands from being seen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc

Event = TypeVar("Event")
Response = TypeVar("Response")
_Event_co = TypeVar("_Event_co", covariant=True)


PEER_GONE = grpc.aio.InternalError
"""What gRPC raises where a message is written to a peer that has gone: nobody is left to be told."""


class Source(Protocol[_Event_co]):
    """What a writer drains."""

    async def next_batch(self) -> _Event_co | None:
        """What goes into the next message, once there is any; None after the end."""


class Outbox(Generic[Event]):
    """Events of one stream in order. All that waits when the writer is free goes into one message."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, event: Event) -> None:
        """Appends; after close it is dropped, since nobody reads any more. Event loop only."""
        if not self._closed:
            self._events.append(event)
            self._ready.set()

    def close(self) -> None:
        """Lets the writer end once all is written."""
        self._closed = True
        self._ready.set()

    def __len__(self) -> int:
        return len(self._events)

    async def next_batch(self) -> list[Event] | None:
        """All waiting events, at least one; None once it is closed and empty."""
        await self._ready.wait()
        events = list(self._events)
        self._events.clear()
        if not self._closed:
            self._ready.clear()
        return events or None


async def serve_stream(
    context: grpc.aio.ServicerContext,
    dispatch: Callable[[Any], None],
    source: Source[Event],
    to_message: Callable[[Event], object],
) -> None:
    """Runs a bidirectional stream until the client half-closes or either side breaks.

    `dispatch` takes each request and must not block; exceptions it raises end the stream. Returns after the client's
    end of stream; what `source` still holds is then dropped with the stream, since state lives as long as its stream.
    """

    async def write() -> None:
        with contextlib.suppress(PEER_GONE):
            while (batch := await source.next_batch()) is not None:
                await context.write(to_message(batch))

    async def read() -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            dispatch(request)

    tasks = [asyncio.create_task(read()), asyncio.create_task(write())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
