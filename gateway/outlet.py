"""What one client is to be told: buffered, so that a slow client never stalls its sequence."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from outrider.errors import Cancelled
from outrider.v1 import gateway_pb2

SLOW_CLIENT_SECONDS = 60.0


class Outlet:
    """Messages in order, from the rounds to the call that writes them."""

    def __init__(self) -> None:
        self._messages: deque[gateway_pb2.GenerateResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, message: gateway_pb2.GenerateResponse) -> None:
        """Never waits."""
        self._messages.append(message)
        self._wake()

    def close(self) -> None:
        """No message follows."""
        self._closed = True
        self._wake()

    async def drain(
        self, write: Callable[[gateway_pb2.GenerateResponse], Awaitable[None]], patience: float = SLOW_CLIENT_SECONDS
    ) -> None:
        """Writes all messages until close. Raises Cancelled when the client takes none for `patience` seconds."""
        while True:
            while self._messages:
                try:
                    async with asyncio.timeout(patience):
                        await write(self._messages.popleft())
                except TimeoutError:
                    raise Cancelled(f"the client read nothing for {patience:g} s", "SLOW_CLIENT") from None
            if self._closed:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
