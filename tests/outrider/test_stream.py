import asyncio

import grpc
import pytest

from outrider import channels
from outrider.server import ServiceFrame
from outrider.stream import Outbox, serve_stream
from outrider.v1 import draft_pb2, draft_pb2_grpc

SERVICE = "outrider.v1.DraftService"


class Echo(draft_pb2_grpc.DraftServiceServicer):
    """Answers each command with an empty Proposal; counts open streams."""

    def __init__(self):
        self.open_streams = 0

    async def Propose(self, request_iterator, context):
        outbox = Outbox()

        def dispatch(request):
            for command in request.commands:
                outbox.put(draft_pb2.DraftEvent(sequence_id=command.sequence_id, proposal={}))

        self.open_streams += 1
        try:
            await serve_stream(context, dispatch, outbox, lambda events: draft_pb2.ProposeResponse(events=events))
        finally:
            self.open_streams -= 1


@pytest.fixture
async def echo():
    servicer = Echo()
    frame = ServiceFrame("draft", SERVICE, "127.0.0.1:0", None)
    await frame.start(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server))
    async with channels.connect(frame.address) as channel:
        yield servicer, draft_pb2_grpc.DraftServiceStub(channel)

    async def finished():
        pass

    await frame.drain(finished, grace=1)


def request(*ids):
    return draft_pb2.ProposeRequest(commands=[draft_pb2.DraftCommand(sequence_id=i, close={}) for i in ids])


async def test_events_come_back_in_order_and_half_close_ends_the_stream(echo):
    _, stub = echo
    call = stub.Propose()
    await call.write(request(1, 2))
    await call.write(request(3))
    seen = []
    while len(seen) < 3:
        seen += [event.sequence_id for event in (await call.read()).events]
    assert seen == [1, 2, 3]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK


async def test_a_peer_that_has_gone_is_no_error():
    class Context:
        async def read(self):
            await asyncio.sleep(60)

        async def write(self, message):
            raise grpc.aio.InternalError("execute_batch")  # as grpc.aio does

    outbox = Outbox()
    outbox.put(draft_pb2.DraftEvent())
    async with asyncio.timeout(50):
        await serve_stream(Context(), print, outbox, lambda events: events)


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_however_a_stream_ends_its_state_goes(echo, how):
    servicer, stub = echo
    call = stub.Propose()
    await call.write(request(1))
    await call.read()
    assert servicer.open_streams == 1
    if how == "cancel":
        call.cancel()
    else:
        await call.done_writing()
    async with asyncio.timeout(60):
        while servicer.open_streams:
            await asyncio.sleep(0.01)
