"""A target that serves only what a draft needs at start-up, in the test's own process and event loop."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import threading
from collections.abc import Callable
from types import TracebackType

import grpc
import torch

from outrider.cuda_memory import CudaDevice
from outrider.errors import Unavailable, abort
from outrider.pair_socket import PairListener, PairSocket
from outrider.server import ServiceFrame
from outrider.shared_buffers import DeviceBuffer
from outrider.shared_memory import SharedSegment
from outrider.shared_slices import SliceWriter
from outrider.tensors import DTYPE_NUMBERS, tensor_bytes
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.drafts import draft_tensors

EMBED = "embed_tokens.weight"
FLAGS = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
Shared = target_pb2.FetchSharedWeightsRequest
_instances = itertools.count(1)


def shared_tensors(directory):
    """Embedding and head for a stub beside a draft: those that its checkpoint would have had."""
    config = json.loads((directory / "config.json").read_text())
    full = draft_tensors({**config, "draft_vocab_size": None}, 0)
    return full[EMBED], full["lm_head.weight"]


def share(tensor: torch.Tensor, device: CudaDevice) -> DeviceBuffer:
    """The tensor in memory of the device."""
    buffer = DeviceBuffer(device, tensor.nbytes)
    buffer.bytes.copy_(tensor.contiguous().view(torch.uint8).flatten())
    return buffer


class StubTarget(target_pb2_grpc.TargetServiceServicer):
    """GetTargetInfo, FetchSharedWeights and Attach over given tensors. Faults are switched on by its attributes."""

    def __init__(
        self,
        embed: torch.Tensor,
        head: torch.Tensor,
        num_layers: int = 4,
        shared_memory: int = 0,
        device: CudaDevice | None = None,
    ) -> None:
        self.tensors = {Shared.SHARED_TENSOR_EMBED_TOKENS: embed, Shared.SHARED_TENSOR_LM_HEAD: head}
        self.info = target_pb2.GetTargetInfoResponse(
            model="stub",
            instance_id=f"instance-{next(_instances)}",
            vocab_size=embed.shape[0],
            hidden_size=embed.shape[1],
            num_layers=num_layers,
            max_sequence_length=512,
            aux_boundaries=range(num_layers + 2),
            weights_fingerprint="f" * 64,
            max_draft_tokens=8,
        )
        self.break_after: int | None = None  # bytes of a fetch after which its stream breaks, once
        self.corrupt = 0  # how many fetches carry a wrong byte
        self.fetches: list[tuple[int, int]] = []
        self.attached: dict[str, asyncio.Event] = {}
        self.shared_memory = shared_memory  # bytes of the buffer that each draft is offered
        self.segment: SharedSegment | None = None
        self.writer: SliceWriter | None = None
        self.pair: PairSocket | None = None  # towards the draft, for pair-local rounds
        # With a device the tensors lie in its memory, too.
        self.memory = {number: share(tensor, device) for number, tensor in self.tensors.items()} if device else {}
        self.frame = ServiceFrame("target", "outrider.v1.TargetService", "127.0.0.1:0", None)

    async def start(self, address: str | None = None) -> str:
        """Serves; returns the address."""
        if address is not None:
            self.frame._listen = address
        await self.frame.start(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(self, server))
        await self.frame.set_serving(True)
        return self.frame.address

    async def stop(self) -> None:
        """Goes away, with all its streams."""

        async def finished() -> None:
            for event in self.attached.values():
                event.set()

        await self.frame.drain(finished, grace=1)

    def detach(self) -> None:
        """Ends all Attach streams."""
        for event in self.attached.values():
            event.set()

    async def GetTargetInfo(self, request, context):
        return self.info

    async def FetchSharedWeights(self, request, context):
        tensor = self.tensors[request.tensor]
        data = bytes(tensor_bytes(tensor))
        digest = hashlib.sha256(data).hexdigest()
        self.fetches.append((request.tensor, request.offset))
        if request.transport == common_pb2.TRANSPORT_CUDA_IPC and self.memory:
            form = {"dtype": DTYPE_NUMBERS[tensor.dtype], "shape": tensor.shape}
            handle = self.memory[request.tensor].handle("")
            yield target_pb2.FetchSharedWeightsResponse(buffer=handle, sha256=digest, **form)
            return
        if self.corrupt:
            self.corrupt -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        for offset in range(request.offset, len(data), 8192):
            if self.break_after is not None and offset >= self.break_after:
                self.break_after = None
                await abort(context, Unavailable("broken on purpose"))
            piece = data[offset : offset + 8192]
            yield target_pb2.FetchSharedWeightsResponse(
                dtype=DTYPE_NUMBERS[tensor.dtype],
                shape=tensor.shape,
                chunk={"offset": offset, "data": piece},
                sha256=digest if offset + len(piece) == len(data) else "",
            )

    async def Attach(self, request_iterator, context):
        first = await context.read()
        assert first.WhichOneof("message") == "draft", first
        draft = first.draft.draft_instance_id
        ended = self.attached.setdefault(draft, asyncio.Event())
        buffers, listener = [], None
        if self.shared_memory:
            assert first.draft.pair_rounds
            listener = PairListener()
            assert common_pb2.TRANSPORT_SHARED_MEMORY in first.draft.transports
            self.segment = SharedSegment.create(self.shared_memory)
            buffers.append(
                target_pb2.BufferHandle(
                    buffer_id=f"{self.info.instance_id}/1",
                    transport=common_pb2.TRANSPORT_SHARED_MEMORY,
                    handle=self.segment.name.encode(),
                    size=self.shared_memory,
                )
            )
        answer = target_pb2.AttachResponse(target_instance_id=self.info.instance_id, buffers=buffers)
        answer.socket_name = listener.name if listener else ""
        await context.write(answer)
        tasks = [asyncio.create_task(self._read(context, listener)), asyncio.create_task(ended.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        del self.attached[draft]

    async def _read(self, context, listener: PairListener | None) -> None:
        """Takes what the draft says: opened once, where a buffer was offered, then releases."""
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.WhichOneof("message") == "opened":
                assert listener is not None and self.segment is not None
                self.segment.unlink()
                self.pair = listener.accept()
                self.writer = SliceWriter(self.segment.bytes)
            else:
                assert message.released.buffer_id == f"{self.info.instance_id}/1"
                self.writer.release(message.released.generations)


class Background:
    """A stub target that serves from an event loop in a thread of its own, while a `with` block runs."""

    def __init__(self, make: Callable[[], StubTarget]) -> None:
        self._make = make
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __enter__(self) -> StubTarget:
        self._stub = self._run(self._started())
        return self._stub

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._run(self._stub.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _started(self) -> StubTarget:
        stub = self._make()
        await stub.start()
        return stub

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)
