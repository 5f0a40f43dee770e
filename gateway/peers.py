"""A service that the gateway depends on: watched, asked what it serves, and given up when in doubt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

import grpc

from outrider.channels import connect, watch_serving
from outrider.errors import OutriderError
from outrider.security import ClientSecurity

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
INFO_SECONDS = 5.0
FIRST_TRY_SECONDS = 3.0
_AGAIN_SECONDS = 0.01  # after a doubt, which the next health check often dispels


class Peer(ABC):
    """Available from when its health check answered and what it serves was accepted, until there is a doubt."""

    kind = ""
    service = ""

    def __init__(self, address: str, security: ClientSecurity, on_change: Callable[[], None]) -> None:
        """Raises ValueError where a token would cross a network in the clear."""
        self.address = address
        self.available = False
        self.serving = False  # what its health check said last
        self.problem = "not reached yet"
        self.misfit = ""  # what of it does not fit, in a word
        self.tried = False  # whether it has been found available or not, at least once
        self.pause = 0.0  # seconds to let it be after a doubt
        self._on_change = on_change
        self._doubt = asyncio.Event()
        self.channel: grpc.aio.Channel = connect(address, security=security)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to watch it."""
        self._task = asyncio.create_task(self._supervise())
        asyncio.get_running_loop().call_later(FIRST_TRY_SECONDS, self._give_up_first_try)

    def retire(self) -> None:
        """It is not chosen any more, as if it drained; what runs on it may end."""
        if self._task is not None:
            self._task.cancel()
        self.available = self.serving = False
        self.problem = "no pair names it any more"

    async def stop(self) -> None:
        """Lets go of it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.disconnect()
        await self.channel.close()

    def doubt(self, reason: str) -> None:
        """It is not used again before its health check answers anew."""
        if self.available:
            log.warning("%s %s: %s", self.kind, self.address, reason)
            self._unavailable(reason)
        self._doubt.set()

    @abstractmethod
    async def connect(self) -> None:
        """Asks what it serves and opens the session. Raises OutriderError for what does not fit."""

    @abstractmethod
    def disconnect(self) -> None:
        """Ends the session."""

    async def _supervise(self) -> None:
        while True:
            try:
                await self._until_doubtful()
                await asyncio.sleep(_AGAIN_SECONDS + self.pause)
                continue
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
                if problem != self.problem:
                    log.warning("%s %s: %s", self.kind, self.address, problem)
                self._unavailable(problem)
            except OutriderError as error:
                if not self.misfit or self.problem != error.message:
                    log.error("%s %s is refused: %s", self.kind, self.address, error.message)
                self.misfit = error.reason
                self._unavailable(error.message)
            except Exception as error:
                log.exception("%s %s", self.kind, self.address)
                self._unavailable(f"{type(error).__name__}: {error}")
            await asyncio.sleep(RETRY_SECONDS)

    async def _until_doubtful(self) -> None:
        """Connects once it serves; returns when it no longer does, or is in doubt."""
        async with contextlib.aclosing(watch_serving(self.channel, self.service, RETRY_SECONDS)) as watch:  # type: ignore[type-var]
            async for self.serving in watch:
                if self.serving:
                    break
                if self.problem != "not serving":
                    self._unavailable("not serving")
            self._doubt.clear()
            await self.connect()
            self.misfit = ""
            self.problem = ""
            self.available = self.tried = True
            log.info("%s %s is available", self.kind, self.address)
            self._on_change()
            doubt = asyncio.ensure_future(self._doubt.wait())
            change = asyncio.ensure_future(anext(watch))
            try:
                await asyncio.wait([doubt, change], return_when=asyncio.FIRST_COMPLETED)
                if change.done():
                    self.serving = change.result()
            finally:
                doubt.cancel()
                change.cancel()
                await asyncio.gather(doubt, change, return_exceptions=True)
        if self.available:
            self._unavailable("not serving")

    def _give_up_first_try(self) -> None:
        """Nobody waits any longer to learn whether it is there."""
        self.tried = True
        self._on_change()

    def _unavailable(self, problem: str) -> None:
        self.problem = problem
        self.available, self.tried = False, True
        self._on_change()
