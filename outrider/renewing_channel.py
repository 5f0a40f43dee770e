"""A client's channel whose credentials are files: each call goes out with what they say at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from outrider.watched import Watched

Open = Callable[[grpc.ChannelCredentials | None], grpc.aio.Channel]
Metadata = Callable[[], tuple[tuple[str, str], ...]]


class RenewingChannel(grpc.aio.Channel):
    """A channel that gives way to a new one when the credentials changed. Event loop only.

    gRPC reads a client's certificates once. Calls that are running go on over the old channel, which is closed when
    the last of them has ended; new ones go over the new.
    """

    def __init__(self, open_channel: Open, tls: Watched[grpc.ChannelCredentials] | None, metadata: Metadata) -> None:
        """`metadata` is what every call carries, such as a token."""
        self._open = open_channel
        self._tls = tls
        self._metadata = metadata
        self._credentials = tls.get() if tls else None
        self._link = _Link(open_channel(self._credentials))
        self._retired: set[_Link] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def _current(self) -> _Link:
        credentials = self._tls.get() if self._tls else None
        if credentials is not self._credentials:
            self._credentials, old, self._link = credentials, self._link, _Link(self._open(credentials))
            self._retired.add(old)
            self._close_when_idle(old)
        return self._link

    def _close_when_idle(self, link: _Link) -> None:
        if link in self._retired and not link.num_calls:
            self._retired.remove(link)
            closing = asyncio.get_running_loop().create_task(link.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _ended(self, link: _Link) -> None:
        link.num_calls -= 1
        self._close_when_idle(link)

    def _starter(self, kind: str, method: str, *codecs: Any, **options: Any) -> Callable[..., Any]:
        """What starts calls of `method`, each over the channel that is current then."""

        def start(*request: Any, metadata: Any = None, **call_options: Any) -> Any:
            link = self._current()
            key = (kind, method)
            if key not in link.methods:
                link.methods[key] = getattr(link.channel, kind)(method, *codecs, **options)
            call = link.methods[key](*request, metadata=(*(metadata or ()), *self._metadata()), **call_options)
            link.num_calls += 1
            call.add_done_callback(lambda _: self._ended(link))
            return call

        return start

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        """As of any channel."""
        return self._starter("unary_unary", *method, **options)

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        """As of any channel."""
        return self._starter("unary_stream", *method, **options)

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        """As of any channel."""
        return self._starter("stream_unary", *method, **options)

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        """As of any channel."""
        return self._starter("stream_stream", *method, **options)

    async def close(self, grace: float | None = None) -> None:
        """Ends all calls, those over retired channels too."""
        await asyncio.gather(*(link.channel.close(grace) for link in (self._link, *self._retired)), *self._closing)
        self._retired.clear()

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the channel that new calls go over."""
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the channel that new calls go over."""
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Of the channel that new calls go over."""
        await self._current().channel.channel_ready()


class _Link:
    """A real channel, its methods, and the number of calls that run over it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_calls = 0
        self.methods: dict[tuple[str, str], Callable[..., Any]] = {}
