"""A client of one Propose stream."""

from __future__ import annotations

import asyncio

import grpc
import torch

from outrider.channels import connect, is_serving, wait_serving
from outrider.tensors import encode
from outrider.v1 import draft_pb2, draft_pb2_grpc

SERVICE = "outrider.v1.DraftService"


class DraftClient:
    """One session on a draft service; answers come back one event at a time."""

    def __init__(self, address: str) -> None:
        self.channel = connect(address)
        self.stub = draft_pb2_grpc.DraftServiceStub(self.channel)
        self.call = self.stub.Propose()
        self._events: list[draft_pb2.DraftEvent] = []

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()

    async def info(self) -> draft_pb2.GetDraftInfoResponse:
        return await self.stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), timeout=60)

    async def send(self, *commands: draft_pb2.DraftCommand) -> None:
        await self.call.write(draft_pb2.ProposeRequest(commands=commands))

    async def event(self, timeout: float = 60) -> draft_pb2.DraftEvent:
        """The next event of the session."""
        while not self._events:
            answer = await asyncio.wait_for(self.call.read(), timeout)
            assert answer is not grpc.aio.EOF, "the session ended"
            self._events += answer.events
        return self._events.pop(0)

    async def propose(self, command: draft_pb2.DraftCommand) -> draft_pb2.DraftEvent.Proposal:
        """Sends one command and returns the proposal that answers it."""
        await self.send(command)
        event = await self.event()
        assert event.WhichOneof("event") == "proposal", event
        assert event.sequence_id == command.sequence_id
        return event.proposal


def open_draft(sequence_id: int, **sampling) -> draft_pb2.DraftCommand:
    return draft_pb2.DraftCommand(sequence_id=sequence_id, open={"sampling": sampling or {"temperature": 0}})


def extend_draft(
    sequence_id: int, first: int, states: torch.Tensor, tokens: list[int], wanted: int, min_confidence: float = 0.0
) -> draft_pb2.DraftCommand:
    return draft_pb2.DraftCommand(
        sequence_id=sequence_id,
        extend={
            "hidden_states": {"first_position": first, "tensor": encode(states)},
            "token_ids": tokens,
            "num_draft_tokens": wanted,
            "min_confidence": min_confidence,
        },
    )


def close_draft(sequence_id: int) -> draft_pb2.DraftCommand:
    return draft_pb2.DraftCommand(sequence_id=sequence_id, close={})


async def until_serving(service, wanted):
    """Returns once the draft process serves, or does not."""
    client = DraftClient(service.address)
    try:
        if wanted:
            await wait_serving(client.channel, SERVICE, 100)
            return
        async with asyncio.timeout(100):
            while await is_serving(client.channel, SERVICE, timeout=60):
                await asyncio.sleep(0.01)
    finally:
        await client.close()
