"""Requests that never end: streams that ask a gateway again and again, in a thread, until they are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import grpc

from tests.gateway.client import Client


class Load:
    """An event loop in a thread, and the streams that run on it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    @contextlib.contextmanager
    def running(self, **kinds: tuple[int, dict[str, Any]]) -> Iterator[None]:
        """While the block runs, `kinds` do: each a number of streams and the fields of their requests."""
        streams = [
            self._start(self._stream(index, fields)) for count, fields in kinds.values() for index in range(count)
        ]
        try:
            yield
        finally:
            for stream in streams:
                stream.cancel()

    @contextlib.contextmanager
    def arriving(self, count: int, every: float, **fields: Any) -> Iterator[None]:
        """While the block runs, `count` requests arrive, one `every` so many seconds."""

        async def arrive() -> None:
            async with Client(self._address) as client, asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(client.generate(timeout=120, **fields))
                    await asyncio.sleep(every)

        arrivals = self._start(arrive())
        try:
            yield
        finally:
            arrivals.cancel()

    def stop(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _stream(self, index: int, fields: dict[str, Any]) -> None:
        """One request after the other; what a fault does to one is no reason to stop."""
        sampling = {"seed": index, **fields["sampling"]}
        async with Client(self._address) as client:
            while True:
                try:
                    await client.generate(timeout=120, **{**fields, "sampling": sampling})
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
