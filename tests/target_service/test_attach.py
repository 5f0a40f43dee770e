"""Hidden states through shared memory, between real processes."""

import time

import grpc
import pytest
import torch

from outrider.shared_memory import SharedSegment
from outrider.shared_slices import RETIREMENT_SECONDS
from outrider.v1 import common_pb2, target_pb2
from tests.gateway.running import wait
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.target_service.attached_draft import Draft, advanced_after_prefill
from tests.target_service.client import Client, rows

PROMPT = list(range(5, 45))
SHARED = common_pb2.TRANSPORT_SHARED_MEMORY
INLINE = common_pb2.TRANSPORT_INLINE
SIZE = 64 << 10


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("llama"), dtype=torch.float32)
    flags = ["--model", checkpoint, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with Service("target_service", *flags, "--shared-memory", SIZE, "--step-tokens", 16) as service:
        yield service


async def test_slices_hold_what_inline_rows_hold(target):
    async with Client(target.address) as client, client.session() as session:
        draft = Draft(client)
        response = await draft.attach()
        info = await client.info()
        assert response.target_instance_id == info.instance_id
        assert response.buffers[0].buffer_id.startswith(info.instance_id)
        assert list(info.transports) == [SHARED, INLINE]
        await draft.open()

        inline = await session.open(PROMPT, aux={"boundaries": [1, 4]})
        expected = [
            rows(e)[1] for events in [await advanced_after_prefill(session, inline)] for e in [*events[0], events[1]]
        ]
        shared = await session.open(PROMPT, aux=draft.aux)
        prefilled, advanced = await advanced_after_prefill(session, shared)
        events = [*prefilled, advanced]
        slices = [event.hidden_states.tensor.slice for event in events]
        assert [s.generation for s in slices] == list(range(slices[0].generation, slices[0].generation + len(slices)))
        assert [event.hidden_states.first_position for event in events] == [0, 16, 32, 39]
        for event, inline_rows in zip(events, expected, strict=True):
            assert torch.equal(draft.read(event), inline_rows)
        assert target.metric("outrider_unreleased_slices") == len(events)
        await draft.release(*(s.generation for s in reversed(slices)))
        await wait(lambda: target.metric("outrider_unreleased_slices") == 0)
        assert target.metric("outrider_hidden_state_bytes_total", transport="shared_memory") == 40 * 128 * 4
        assert await draft.detach() is grpc.StatusCode.OK


async def test_a_full_buffer_is_served_inline_until_slices_are_released(target):
    async with Client(target.address) as client, client.session() as session:
        draft = Draft(client)
        await draft.attach()
        await draft.open()
        first = await session.open(list(range(300)) * 2, aux=draft.aux, ignore_eos=True)
        prefilled, _ = await advanced_after_prefill(session, first)
        sources = [event.hidden_states.tensor.WhichOneof("source") for event in prefilled]
        assert sources[0] == "slice" and sources[-1] == "data"
        taken = [e.hidden_states.tensor.slice.generation for e in prefilled if e.hidden_states.tensor.HasField("slice")]
        await draft.release(*taken)
        await wait(lambda: target.metric("outrider_unreleased_slices") == 0)
        await session.advance(first)
        assert (await session.advanced(first)).hidden_states.tensor.WhichOneof("source") == "slice"
        await draft.detach()


async def test_slices_of_a_freed_sequence_are_free_a_little_later(target):
    async with Client(target.address) as client, client.session() as session:
        draft = Draft(client)
        await draft.attach()
        await draft.open()
        sequence = await session.open(PROMPT, aux=draft.aux)
        await session.advanced(sequence)
        assert target.metric("outrider_unreleased_slices") == 4
        closed = time.monotonic()
        await session.close(sequence)
        await wait(lambda: target.metric("outrider_num_requests_running") == 0)
        held = target.metric("outrider_unreleased_slices")
        assert held == 4 or time.monotonic() - closed > RETIREMENT_SECONDS
        await wait(lambda: target.metric("outrider_unreleased_slices") == 0)
        await draft.detach()


@pytest.mark.parametrize(
    "aux",
    [
        {"boundaries": [1], "transport": SHARED, "draft_instance_id": "nobody"},
        {"boundaries": [1], "transport": common_pb2.TRANSPORT_CUDA_IPC, "draft_instance_id": "draft-1"},
        {"boundaries": [1], "transport": INLINE, "draft_instance_id": "draft-1"},
        {"boundaries": [1], "draft_instance_id": "draft-1"},
    ],
)
async def test_a_draft_or_transport_that_is_not_attached_is_served_inline(target, aux):
    async with Client(target.address) as client, client.session() as session:
        draft = Draft(client)
        await draft.attach()
        await draft.open()
        sequence = await session.open(PROMPT, aux=aux)
        assert (await session.advanced(sequence)).hidden_states.tensor.WhichOneof("source") == "data"


async def test_inline_again_once_the_draft_is_gone_and_slices_before_it_opened(target):
    async with Client(target.address) as client, client.session() as session:
        draft = Draft(client)
        await draft.attach()
        sequence = await session.open(PROMPT, aux=draft.aux)
        assert (await session.advanced(sequence)).hidden_states.tensor.WhichOneof("source") == "data"
        await draft.open()
        await session.advance(sequence)
        assert (await session.advanced(sequence)).hidden_states.tensor.WhichOneof("source") == "slice"
        await draft.detach()
        await session.advance(sequence)
        assert (await session.advanced(sequence)).hidden_states.tensor.WhichOneof("source") == "data"
        await wait(lambda: target.metric("outrider_attached_drafts") == 0)


async def test_a_draft_without_shared_memory_gets_no_buffer(target):
    async with Client(target.address) as client:
        draft = Draft(client, transports=[INLINE])
        assert list((await draft.attach()).buffers) == []
        assert await draft.detach() is grpc.StatusCode.OK


async def test_what_is_out_of_turn_ends_the_stream_with_its_name(target):
    async with Client(target.address) as client:
        call = client.stub.Attach()
        await call.write(target_pb2.AttachRequest(opened={}))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "AttachDraft" in await call.details()

        for wrong in ({"generations": [99]}, {"buffer_id": "other"}):
            draft = Draft(client)
            await draft.attach()
            await draft.open()
            await draft.release(*wrong.get("generations", [1]), buffer_id=wrong.get("buffer_id"))
            assert await draft._call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "released." in await draft._call.details()


async def test_a_name_that_was_opened_is_gone(target):
    async with Client(target.address) as client:
        draft = Draft(client)
        handle = (await draft.attach()).buffers[0]
        await draft.open()
        with pytest.raises(Exception, match="cannot be opened"):
            SharedSegment.open(handle.handle.decode(), handle.size)
