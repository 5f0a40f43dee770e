"""Text that a target writes when it is asked, with its hidden states: the gateway's part of the contract, in small."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc
import torch

from outrider.errors import OutriderError, from_status
from outrider.tensors import decode
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc

_GREEDY = common_pb2.SamplingParams(temperature=0)


@dataclass(frozen=True)
class Passage:
    """A prompt and what the target wrote after it.

    states [n, k * Ht]: of the first n positions, at least all but the last, boundaries side by side in ascending order.
    """

    token_ids: list[int]
    num_prompt: int
    states: torch.Tensor

    def at_boundaries(self, chosen: Sequence[int], all_boundaries: Sequence[int]) -> Passage:
        """The same with the states of some of its boundaries only."""
        parts = self.states.chunk(len(all_boundaries), dim=1)
        kept = [part for part, boundary in zip(parts, all_boundaries, strict=True) if boundary in chosen]
        return replace(self, states=torch.cat(kept, dim=1))


async def write_passages(
    stub: target_pb2_grpc.TargetServiceStub,
    prompts: Sequence[Sequence[int]],
    boundaries: Sequence[int],
    num_tokens: int,
    seconds: float,
) -> list[Passage]:
    """Has the target go on, greedily, by at most `num_tokens` after each prompt, all at once.

    Returns what was written after `seconds`, without the prompts that it had not come to or that it refused. Raises
    AioRpcError where the target is lost, OutriderError where it refuses all.
    """
    call = stub.Verify()
    writers = {number: _Writer(list(prompt), len(prompt)) for number, prompt in enumerate(prompts, start=1)}
    aux = target_pb2.TargetCommand.AuxRequest(boundaries=sorted(boundaries), transport=common_pb2.TRANSPORT_INLINE)
    opens = [_open(number, prompt, num_tokens, aux) for number, prompt in enumerate(prompts, start=1)]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await call.write(target_pb2.VerifyRequest(commands=opens))
                await _converse(call, writers)
    finally:
        call.cancel()  # frees all of it
    errors = [writer.error for writer in writers.values() if writer.error is not None]
    if len(errors) == len(writers):
        raise errors[0]
    return [writer.passage() for writer in writers.values() if len(writer.token_ids) > writer.num_prompt]


async def _converse(call: grpc.aio.StreamStreamCall, writers: dict[int, _Writer]) -> None:
    """Advances every sequence, step by step, until all have ended."""
    num_open = len(writers)
    while num_open:
        message = await call.read()
        if not isinstance(message, target_pb2.VerifyResponse):  # the end of the stream
            return
        going_on = []
        for event in message.events:
            if writers[event.sequence_id].take(event):
                num_open -= 1
            elif event.WhichOneof("event") == "advanced":
                going_on.append(target_pb2.TargetCommand(sequence_id=event.sequence_id, advance={}))
        if going_on:
            await call.write(target_pb2.VerifyRequest(commands=going_on))


@dataclass
class _Writer:
    """One sequence as it grows."""

    token_ids: list[int]
    num_prompt: int
    rows: list[torch.Tensor] = field(default_factory=list)
    error: OutriderError | None = None

    def take(self, event: target_pb2.TargetEvent) -> bool:
        """Adds what an event brings; whether the sequence has ended."""
        kind = event.WhichOneof("event")
        if kind == "error":
            self.error = from_status(event.error)
            return True
        part = event.prefilled if kind == "prefilled" else event.advanced
        if part.HasField("hidden_states"):
            self.rows.append(decode(part.hidden_states.tensor, "hidden_states", copy=True))
        if kind == "prefilled":
            return False
        self.token_ids += event.advanced.token_ids
        return bool(event.advanced.finish_reason)

    def passage(self) -> Passage:
        """What there is of it."""
        return Passage(self.token_ids, self.num_prompt, torch.cat(self.rows))


def _open(
    number: int, prompt: Sequence[int], num_tokens: int, aux: target_pb2.TargetCommand.AuxRequest
) -> target_pb2.TargetCommand:
    command = target_pb2.TargetCommand.OpenSequence(
        token_ids=prompt,
        sampling=_GREEDY,
        max_new_tokens=num_tokens,
        aux=aux,
        arrival_unix_us=time.time_ns() // 1000,
        request_id="draft-self-test",
    )
    return target_pb2.TargetCommand(sequence_id=number, open=command)
