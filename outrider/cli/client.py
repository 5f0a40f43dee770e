"""A client of the gateway: one streamed generation, and errors as one line."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import grpc
import typer
from grpc_status import rpc_status

from outrider.channels import CLIENT_MESSAGE_BYTES
from outrider.channels import connect as connect_channel
from outrider.errors import InvalidArgument, from_status
from outrider.security import NO_SECURITY, ClientSecurity
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50050"  # where a gateway listens by default
CANCELLED = 130  # exit code after Ctrl-C, as shells have it
BROKEN_PIPE = 141  # and after the reader of standard output has left

_NO_CONNECTION = "failed to connect"  # as gRPC says it
_NOT_LET_IN = ("handshake", "Verification", "Socket closed")  # TLS on one side only, or another certificate

Result = TypeVar("Result")


@dataclass
class Generation:
    """One finished request. Times are seconds on time.perf_counter's clock."""

    sent: float
    text: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    # (when, how many tokens) of each message that carried tokens.
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str = ""
    seed: int = 0
    usage: gateway_pb2.GenerateResponse.Usage = field(default_factory=gateway_pb2.GenerateResponse.Usage)
    finished: float = 0.0

    @property
    def time_to_first_token(self) -> float:
        """Seconds from sending the request to its first token; to its end where there was none."""
        return (self.arrivals[0][0] if self.arrivals else self.finished) - self.sent

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token's message to the last's."""
        return self.arrivals[-1][0] - self.arrivals[0][0] if self.arrivals else 0.0

    @property
    def decode_tokens(self) -> int:
        """Tokens that arrived in `decode_seconds`."""
        return sum(count for _, count in self.arrivals[1:])


async def generate(
    stub: gateway_pb2_grpc.GatewayServiceStub,
    request: gateway_pb2.GenerateRequest,
    on_piece: Callable[[gateway_pb2.GenerateResponse], None] = lambda piece: None,
) -> Generation:
    """Sends `request`, hands each message to `on_piece` as it arrives, and returns the whole.

    Raises grpc.aio.AioRpcError. Cancelling this cancels the request.
    """
    result = Generation(sent=time.perf_counter())
    await receive(stub, request, result, on_piece)
    return result


async def receive(
    stub: gateway_pb2_grpc.GatewayServiceStub,
    request: gateway_pb2.GenerateRequest,
    result: Generation,
    on_piece: Callable[[gateway_pb2.GenerateResponse], None],
) -> None:
    """As `generate`, into `result`: what it has when this raises can be continued."""
    async for piece in stub.Generate(request):
        if piece.token_ids:
            result.arrivals.append((time.perf_counter(), len(piece.token_ids)))
        result.text += piece.text
        result.token_ids += piece.token_ids
        result.from_draft += piece.from_draft
        if piece.HasField("seed"):
            result.seed = piece.seed
            if not result.prompt_token_ids:  # of a continuation, the earlier tokens count as prompt
                result.prompt_token_ids += piece.prompt_token_ids
        if piece.finish_reason:
            name = common_pb2.FinishReason.Name(piece.finish_reason)
            result.finish_reason = name.removeprefix("FINISH_REASON_").lower()
            result.usage = piece.usage
        on_piece(piece)
    result.finished = time.perf_counter()


def connect(address: str, security: ClientSecurity = NO_SECURITY) -> grpc.aio.Channel:
    """A channel to the gateway at HOST:PORT or unix:PATH, or to all gateways that dns:///NAME:PORT stands for."""
    return connect_channel(address, CLIENT_MESSAGE_BYTES, security, in_turn=address.startswith("dns:"))


def run(command: Coroutine[Any, Any, Result]) -> Result:
    """Runs a client command to its end. A failed call is one line and exit code 1, Ctrl-C exit code 130."""
    try:
        with ended_by_reader():
            return asyncio.run(command)
    except grpc.aio.AioRpcError as error:
        fail(describe(error))
    except KeyboardInterrupt:
        raise typer.Exit(CANCELLED) from None


@contextmanager
def ended_by_reader() -> Iterator[None]:
    """Ends the command with exit code 141 where the reader of standard output, such as `head`, has left."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes what is left when it exits
        raise typer.Exit(BROKEN_PIPE) from None


def describe(error: grpc.aio.AioRpcError) -> str:
    """One line that names the code, the field where one is to blame, and what was wrong with it."""
    status = rpc_status.from_call(error)
    if status is None and _NO_CONNECTION in (error.details() or ""):
        return f"{error.code().name}: {error.details()}; {_hint(error.details() or '')}"
    known = from_status(status) if status is not None else None
    message = " ".join((known.message if known else error.details() or "no details").split())
    if isinstance(known, InvalidArgument) and not message.startswith(known.field):
        message = f"{known.field}: {message}"
    return f"{error.code().name}: {message}"


def _hint(details: str) -> str:
    """What to look at where no connection came about."""
    if any(sign in details for sign in _NOT_LET_IN):
        return (
            "something listens there: does it speak TLS (--peer-ca-certs), and ask for a certificate (--ssl-certfile)?"
        )
    return "`outrider up` starts a gateway, --address names another"


def fail(message: str) -> NoReturn:
    """Ends the command with one line on standard error and exit code 1."""
    print(f"outrider: {message}", file=sys.stderr)
    raise typer.Exit(1)
