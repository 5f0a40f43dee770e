"""Bearer tokens: read from a file, shown with every call, asked for by a server."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health

from outrider.errors import Unauthenticated, abort
from outrider.watched import Watched

HEADER = "authorization"
_SCHEME = "bearer "
_SHORTEST = 16  # characters

Tokens = Callable[[], Sequence[str]]


def tokens_of(path: Path, flag: str) -> Watched[tuple[str, ...]]:
    """The tokens of a file, one a line. Raises OSError or ValueError, naming flag and file, for a file of none."""

    def parse(contents: Sequence[bytes]) -> tuple[str, ...]:
        try:
            lines = contents[0].decode("ascii").split("\n")
        except UnicodeDecodeError:
            raise ValueError(f"{flag}: expected ASCII in {path}, found other bytes") from None
        tokens = tuple(line.strip() for line in lines if line.strip())
        if not tokens:
            raise ValueError(f"{flag}: expected one token a line in {path}, found none")
        for token in tokens:
            check_token(token, f"{flag}: {path}")
        return tokens

    return Watched([path], parse)


def check_token(token: str, where: str) -> None:
    """Raises ValueError, which does not repeat the token, for one that a header cannot carry, or that is short."""
    if len(token) < _SHORTEST or not all("!" <= character <= "~" for character in token):
        raise ValueError(
            f"{where}: expected tokens of at least {_SHORTEST} printable characters, found one of {len(token)}"
        )


def bearer(token: str) -> tuple[str, str]:
    """The metadata that shows a token."""
    return HEADER, f"Bearer {token}"


class TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without one of the tokens, but for health checks, which probes make without one."""

    def __init__(self, service: str, tokens: Tokens) -> None:
        self._service = service
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Called once a call, not once a message: a stream that was let in goes on."""
        if handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/"):
            return await continuation(handler_call_details)
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == HEADER]
        if len(shown) == 1 and is_known(shown[0], self._tokens()):
            return await continuation(handler_call_details)
        return _refuse(f"{self._service}: expected `{HEADER}: Bearer TOKEN`, found {'another' if shown else 'none'}")


def is_known(shown: str | bytes, tokens: Iterable[str]) -> bool:
    """Whether a header's value shows one of `tokens`, in a time that says nothing about them."""
    value = shown.encode() if isinstance(shown, str) else shown
    scheme, token = value[: len(_SCHEME)], value[len(_SCHEME) :]
    matches = [hmac.compare_digest(token, known.encode()) for known in tokens]
    return scheme.lower() == _SCHEME.encode() and any(matches)


def _refuse(message: str) -> grpc.RpcMethodHandler:
    """A handler for calls of any kind: of a stream's kind, since that one waits for no message."""

    async def handler(_requests: Any, context: grpc.aio.ServicerContext) -> None:
        await abort(context, Unauthenticated(message))

    return grpc.stream_stream_rpc_method_handler(handler)
