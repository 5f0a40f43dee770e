"""gRPC channel and server options, and clients' view of a service's health."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.renewing_channel import RenewingChannel
from outrider.security import NO_SECURITY, ClientSecurity

log = logging.getLogger(__name__)

CLIENT_MESSAGE_BYTES = 8 << 20  # from clients to the gateway
SERVICE_MESSAGE_BYTES = 64 << 20  # between services
FULL_MESSAGE_BYTES = 4 << 20  # what gathers for a service goes into the next message above this

_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # While data flows gRPC measures the bandwidth with a ping of its own, and the keepalive's waits behind it: a peer
    # that has vanished was noticed after this one's time-out, 60 s by default.
    ("grpc.http2.ping_timeout_ms", 15_000),
]

_IN_TURN = ("grpc.lb_policy_name", "round_robin")


def channel_options(max_message_bytes: int = SERVICE_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of a client's channel: keepalive both ways and the largest message."""
    return [
        *_KEEPALIVE,
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # A channel of its own per client: a shared subchannel would share its backoff too.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long one attempt may take, not how often one is made: a busy or distant peer answers late.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A pod that is made anew has another address under its name: by default that is asked for every 30 s only.
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ]


def server_options(max_receive_bytes: int = SERVICE_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of a server. Pings of clients are welcome as often as `channel_options` sends them."""
    return [
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_send_message_length", SERVICE_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.so_reuseport", 0),  # two servers on one port is a mistake, not a balance
    ]


def connection_age(seconds: float, grace: float) -> list[tuple[str, int]]:
    """Further options of a server whose clients come through a changing set of addresses.

    A connection older than `seconds` takes no new calls, so that its client looks around anew; calls on it get
    `grace` seconds to end. 0 `seconds` for no such limit.
    """
    if not seconds:
        return []
    return [
        ("grpc.max_connection_age_ms", _milliseconds(seconds)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(grace)),
    ]


def _milliseconds(seconds: float) -> int:
    """For an int32 of gRPC, which takes the largest for no limit."""
    return int(min(seconds * 1000, 2**31 - 1))


def check_address(address: str, flag: str = "") -> None:
    """Raises ValueError, naming the flag, if given, for an address without a port: gRPC would go to port 443."""
    if not address.startswith("unix:") and not re.fullmatch(r".*[^:/]:\d+", address):
        named = f"{flag}: " if flag else ""
        raise ValueError(f"{named}expected HOST:PORT, found {address!r}")


def connect(
    address: str,
    max_message_bytes: int = SERVICE_MESSAGE_BYTES,
    security: ClientSecurity = NO_SECURITY,
    in_turn: bool = False,
) -> grpc.aio.Channel:
    """A channel to HOST:PORT (or unix:PATH, or dns:///NAME:PORT).

    Raises ValueError for an address without a port, and where a token would cross the network in the clear.
    `in_turn`: where a name stands for several addresses, calls go to all of them in turn, not to one.
    """
    check_address(address)
    options: list[tuple[str, int | str]] = [*channel_options(max_message_bytes)]
    if in_turn:
        options.append(_IN_TURN)

    def open_channel(credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    if security.plain:
        return open_channel(None)
    security.check(address)
    return RenewingChannel(open_channel, security.tls, security.metadata)


async def is_serving(channel: grpc.aio.Channel, service: str, timeout: float = 1.0) -> bool:
    """Whether the health service of the peer says SERVING for `service`."""
    return not await _why_not_serving(channel, service, timeout)


async def wait_serving(channel: grpc.aio.Channel, service: str, timeout: float, interval: float = 0.1) -> None:
    """Returns once the peer serves `service`. Raises TimeoutError, saying why, after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while problem := await _why_not_serving(channel, service):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{service} did not become ready within {timeout:g} s: {problem}")
        await asyncio.sleep(interval)


async def _why_not_serving(channel: grpc.aio.Channel, service: str, timeout: float = 1.0) -> str:
    """Nothing where the peer serves."""
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "not serving"


async def watch_serving(channel: grpc.aio.Channel, service: str, retry_every: float = 0.2) -> AsyncIterator[bool]:
    """Yields whether the peer serves `service`, at once and at every change; False while out of reach. Endless.

    What is in the way of reaching it, such as a certificate that does not fit, is logged when it changes.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    problem: str | None = None
    while True:
        try:
            async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=False):
                problem = None
                yield answer.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            if error.details() != problem:
                problem = error.details()
                log.info("health of %s: %s %s", service, error.code().name, problem)
        yield False
        await asyncio.sleep(retry_every)
