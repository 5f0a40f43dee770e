"""An answer that its gateway could not finish goes on at another one, or at the same when it is back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import grpc

from outrider.cli.client import Generation, receive
from outrider.v1 import gateway_pb2, gateway_pb2_grpc

PATIENCE_SECONDS = 30.0  # since the last message of an answer that had begun
_PAUSE_SECONDS = 0.2  # after each gateway was asked once


async def generate_somewhere(
    stubs: Sequence[gateway_pb2_grpc.GatewayServiceStub],
    request: gateway_pb2.GenerateRequest,
    on_piece: Callable[[gateway_pb2.GenerateResponse], None] = lambda piece: None,
    patience: float = PATIENCE_SECONDS,
) -> Generation:
    """The whole answer, whichever gateways give it: after UNAVAILABLE the next is asked to continue it.

    The first of all messages says the seed and the prompt, so that the continuation is the one that would have come.
    Raises grpc.aio.AioRpcError: what is not UNAVAILABLE; what each gateway refused before the answer began; UNAVAILABLE
    for `patience` seconds. The usage is of the last call, but for the numbers of tokens.
    """
    result = Generation(sent=time.perf_counter())
    heard = 0.0  # when the last message came

    def take(piece: gateway_pb2.GenerateResponse) -> None:
        nonlocal heard
        heard = time.perf_counter()
        on_piece(piece)

    attempt = 0
    while not result.finish_reason:
        try:
            await receive(stubs[attempt % len(stubs)], continuation(request, result), result, take)
        except grpc.aio.AioRpcError as error:
            attempt += 1
            begun = bool(result.prompt_token_ids)
            tired = time.perf_counter() > heard + patience if begun else attempt >= len(stubs)
            if error.code() is not grpc.StatusCode.UNAVAILABLE or tired:
                raise
            if attempt % len(stubs) == 0:
                await asyncio.sleep(_PAUSE_SECONDS)
    result.usage.prompt_tokens = len(result.prompt_token_ids)
    result.usage.completion_tokens = len(result.token_ids)
    return result


def continuation(request: gateway_pb2.GenerateRequest, result: Generation) -> gateway_pb2.GenerateRequest:
    """The request that continues `result`, which `request` began."""
    following = gateway_pb2.GenerateRequest()
    following.CopyFrom(request)
    if result.prompt_token_ids:
        following.sampling.seed = result.seed
    if result.token_ids:
        following.token_ids.token_ids[:] = [*result.prompt_token_ids, *result.token_ids]
        following.num_generated = request.num_generated + len(result.token_ids)
    return following
