"""A gateway's side of Verify, as small as tests need it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict

import grpc
import torch

from outrider import channels
from outrider.errors import from_status
from outrider.tensors import decode
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc

GREEDY = common_pb2.SamplingParams(temperature=0)


class Client:
    """One channel to a target; `session` opens a Verify stream on it."""

    def __init__(self, address: str, max_message_bytes: int = channels.SERVICE_MESSAGE_BYTES) -> None:
        self._channel = channels.connect(address, max_message_bytes)
        self.stub = target_pb2_grpc.TargetServiceStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def info(self) -> target_pb2.GetTargetInfoResponse:
        return await self.stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())

    def session(self) -> Session:
        return Session(self.stub)


class Session:
    """A Verify stream; events wait in a queue for each sequence."""

    def __init__(self, stub: target_pb2_grpc.TargetServiceStub) -> None:
        self._call = stub.Verify()
        self._events: dict[int, asyncio.Queue] = defaultdict(asyncio.Queue)
        self._reader = asyncio.create_task(self._read())
        self._writing = asyncio.Lock()
        self.next_id = 1
        self.messages: list[target_pb2.VerifyResponse] = []

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        while (message := await self._call.read()) is not grpc.aio.EOF:
            self.messages.append(message)
            for event in message.events:
                self._events[event.sequence_id].put_nowait(event)

    async def send(self, *commands: target_pb2.TargetCommand) -> None:
        async with self._writing:
            await self._call.write(target_pb2.VerifyRequest(commands=commands))

    async def refused(self, command: target_pb2.TargetCommand) -> grpc.StatusCode:
        """Sends what ends the stream, and returns its status."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self.send(command)
        return await self._call.code()

    async def half_close(self) -> grpc.StatusCode:
        await self._call.done_writing()
        return await self._call.code()

    async def open(self, token_ids: list[int], sequence_id: int = 0, **fields) -> int:
        """Opens a sequence, greedy unless `sampling` says otherwise, and returns its id."""
        sequence_id = sequence_id or self.next_id
        self.next_id = max(self.next_id, sequence_id + 1)
        fields = {"sampling": GREEDY, **fields}
        await self.send(open_command(sequence_id, token_ids, **fields))
        return sequence_id

    async def advance(self, sequence_id: int, chain: list[int] = (), **fields) -> None:
        await self.send(advance_command(sequence_id, chain, **fields))

    async def close(self, sequence_id: int) -> None:
        await self.send(target_pb2.TargetCommand(sequence_id=sequence_id, close={}))

    async def event(self, sequence_id: int, timeout: float = 150) -> target_pb2.TargetEvent:
        """The next event of a sequence; the error it carries is raised."""
        event = await asyncio.wait_for(self._events[sequence_id].get(), timeout)
        if event.WhichOneof("event") == "error":
            raise from_status(event.error)
        return event

    def waiting(self, sequence_id: int) -> int:
        """Events of a sequence that nobody has taken."""
        return self._events[sequence_id].qsize()

    async def advanced(self, sequence_id: int) -> target_pb2.TargetEvent.Advanced:
        """The next Advanced event, past Prefilled ones."""
        while (event := await self.event(sequence_id)).WhichOneof("event") != "advanced":
            pass
        return event.advanced

    async def run(self, token_ids: list[int], chain_of=lambda emitted: [], **fields) -> Run:
        """All that the target says of a prompt until its sequence ends; `chain_of` proposes after each answer."""
        sequence_id = await self.open(token_ids, **fields)
        run = Run()
        while not run.finish_reason:
            event = await self.event(sequence_id)
            run.take(event)
            if event.WhichOneof("event") == "advanced" and not run.finish_reason:
                await self.advance(sequence_id, chain_of(run.token_ids))
        return run


class Run:
    """What came of one sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[common_pb2.TokenLogprobs] = []
        self.prompt_logprobs: list[common_pb2.TokenLogprobs] = []
        self.prompt_logprob_positions: list[int] = []
        self.num_steps = self.num_accepted = 0
        self.finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED
        self._rows: list[torch.Tensor] = []
        self._num_rows = 0

    def take(self, event: target_pb2.TargetEvent) -> None:
        part = event.prefilled if event.WhichOneof("event") == "prefilled" else event.advanced
        if (found := rows(part)) is not None:
            assert found[0] == self._num_rows, "rows of consecutive positions"
            self._rows.append(found[1])
            self._num_rows += len(found[1])
        if isinstance(part, target_pb2.TargetEvent.Prefilled):
            first = part.first_logprob_position
            self.prompt_logprob_positions += range(first, first + len(part.prompt_logprobs))
            self.prompt_logprobs += part.prompt_logprobs
            return
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.num_steps += 1
        self.num_accepted += part.num_accepted
        self.finish_reason = part.finish_reason

    @property
    def rows(self) -> torch.Tensor:
        """All hidden states, from position 0 on."""
        return torch.cat(self._rows) if self._rows else torch.empty(0)


def open_command(sequence_id: int, token_ids: list[int], **fields) -> target_pb2.TargetCommand:
    return target_pb2.TargetCommand(sequence_id=sequence_id, open={"token_ids": token_ids, **fields})


def advance_command(sequence_id: int, chain: list[int] = (), **fields) -> target_pb2.TargetCommand:
    return target_pb2.TargetCommand(sequence_id=sequence_id, advance={"draft_token_ids": chain, **fields})


def rows(event: target_pb2.TargetEvent.Prefilled | target_pb2.TargetEvent.Advanced):
    """(first position, tensor) of an event's inline hidden states; None without any."""
    if not event.HasField("hidden_states"):
        return None
    return event.hidden_states.first_position, decode(event.hidden_states.tensor, "hidden_states")
