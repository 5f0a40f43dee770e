"""What one client is to be told: buffered, so that a slow client never stalls its sequence."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from gateway.streams import after_writes
from outrider.errors import Cancelled
from outrider.v1 import gateway_pb2

SLOW_CLIENT_SECONDS = 60.0


class Outlet:
    """Messages in order, from the rounds to the call that writes them."""

    def __init__(self) -> None:
        self._messages: deque[gateway_pb2.GenerateResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._writing_since: float | None = None

    def put(self, message: gateway_pb2.GenerateResponse) -> None:
        """Never waits. The client is told after the services: a round goes first."""
        self._messages.append(message)
        after_writes(self._wake)

    def close(self) -> None:
        """No message follows. Its end comes behind what was put off before, such as what is counted of its rounds."""
        after_writes(self._close)

    async def drain(
        self, write: Callable[[gateway_pb2.GenerateResponse], Awaitable[None]], patience: float = SLOW_CLIENT_SECONDS
    ) -> None:
        """Writes all messages until close. Raises Cancelled when the client takes none for `patience` seconds."""
        loop = asyncio.get_running_loop()
        watch = loop.create_task(self._watch(patience, asyncio.current_task()))
        try:
            while True:
                while self._messages:
                    self._writing_since = loop.time()
                    await write(self._messages.popleft())
                    self._writing_since = None
                if self._closed:
                    return
                self._waiter = loop.create_future()
                await self._waiter
        except asyncio.CancelledError:
            if watch.done() and not watch.cancelled():
                raise Cancelled(f"the client read nothing for {patience:g} s", "SLOW_CLIENT") from None
            raise
        finally:
            watch.cancel()

    async def _watch(self, patience: float, drain: asyncio.Task[None] | None) -> None:
        """Ends with a cancellation of `drain` when one write takes too long. Cheaper than a time-out for each."""
        now = asyncio.get_running_loop().time
        while self._writing_since is None or now() < self._writing_since + patience:
            await asyncio.sleep(patience / 10)
        if drain is not None:
            drain.cancel()

    def _close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
