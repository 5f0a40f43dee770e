"""The draft's side of Attach."""

import asyncio
from pathlib import Path

from outrider.shared_buffers import INLINE, SHARED_MEMORY, open_buffer
from outrider.shared_slices import SliceReader
from outrider.tensors import decode
from outrider.v1 import target_pb2


class Draft:
    """A draft's side of Attach."""

    def __init__(
        self, client, instance_id="draft-1", transports=(SHARED_MEMORY, INLINE), device=None, pair_rounds=False
    ):
        """`device`: the CUDA device that it computes on."""
        self.instance_id = instance_id
        self.device = device
        self._call = client.stub.Attach()
        self._hello = target_pb2.AttachRequest(
            draft={"draft_instance_id": instance_id, "transports": transports, "pair_rounds": pair_rounds},
        )

    async def attach(self):
        await self._call.write(self._hello)
        self.response = await self._call.read()
        return self.response

    async def open(self):
        (handle,) = self.response.buffers
        self.buffer = open_buffer(handle, self.device)
        self.reader = SliceReader({handle.buffer_id: self.buffer.bytes})
        await self._call.write(target_pb2.AttachRequest(opened={}))
        if handle.transport != SHARED_MEMORY:
            await asyncio.sleep(0.1)
            return
        while (Path("/dev/shm") / handle.handle.decode()).exists():  # its name goes once the target knows
            await asyncio.sleep(0.005)

    def read(self, event):
        return decode(event.hidden_states.tensor, "rows", self.reader.resolve, copy=True)

    async def release(self, *generations, buffer_id=None):
        released = {"buffer_id": buffer_id or self.response.buffers[0].buffer_id, "generations": generations}
        await self._call.write(target_pb2.AttachRequest(released=released))

    async def detach(self):
        await self._call.done_writing()
        return await self._call.code()

    @property
    def aux(self):
        transport = self.response.buffers[0].transport
        return {"boundaries": [1, 4], "transport": transport, "draft_instance_id": self.instance_id}


async def advanced_after_prefill(session, sequence):
    """The Prefilled events of a sequence, and the Advanced event after them."""
    prefilled = []
    while (event := await session.event(sequence)).WhichOneof("event") == "prefilled":
        prefilled.append(event.prefilled)
    return prefilled, event.advanced
