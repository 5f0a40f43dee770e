"""The draft's side of its target: what it serves, the attachment that is held open, slices and their release."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import grpc
import torch

from draft_service.sequence import Part
from outrider.channels import connect, wait_serving
from outrider.cuda_memory import CudaDevice, CudaError
from outrider.errors import InvalidArgument, OutriderError
from outrider.pair_socket import PairSocket
from outrider.security import ClientSecurity
from outrider.shared_buffers import CUDA_IPC, INLINE, SHARED_MEMORY, TRANSPORT_NAMES, SharedBuffer, open_buffer
from outrider.shared_slices import SliceReader
from outrider.stream import Outbox
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

TARGET_SERVICE = "outrider.v1.TargetService"
_LOG_EVERY = 10.0
_REFUSED_SECONDS = 1.0  # until a target that serves, but refused this draft, is asked again
# Slices that were read are released together: a message a round would cost both sides more than the memory is worth.
RELEASE_SECONDS = 0.05


class TargetLink:
    """One target address. Event loop only, but for slices."""

    def __init__(self, address: str, security: ClientSecurity, device: CudaDevice | None = None) -> None:
        """`device`: where the draft computes, None for a CPU.

        Raises ValueError where a token would cross a network in the clear.
        """
        self.address = address
        self.transport = INLINE
        """How the newest attachment's buffers are shared."""
        self._device = device
        self._channel = connect(address, security=security)
        self.stub = target_pb2_grpc.TargetServiceStub(self._channel)
        self._slices = SliceReader({})
        self._buffer_ids: frozenset[str] = frozenset()
        self._read: deque[common_pb2.BufferSlice] = deque()
        self._flushing = False
        # Slices that were resolved and not released yet.
        self._unread: set[tuple[str, int]] = set()
        self._released: Outbox[common_pb2.BufferSlice] | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def num_unread(self) -> int:
        """Slices that were resolved and not released yet."""
        return len(self._unread)

    async def info(self) -> target_pb2.GetTargetInfoResponse:
        """What the target serves, once it serves; waits as long as that takes."""
        while True:
            try:
                await wait_serving(self._channel, TARGET_SERVICE, _LOG_EVERY)
                return await self.stub.GetTargetInfo(target_pb2.GetTargetInfoRequest(), timeout=_LOG_EVERY)
            except TimeoutError as error:
                log.info("waiting for the target at %s: %s", self.address, error)
            except grpc.aio.AioRpcError as error:
                log.warning("the target at %s: %s %s", self.address, error.code().name, error.details())
                await asyncio.sleep(_REFUSED_SECONDS)

    @asynccontextmanager
    async def attach(self, draft_instance_id: str) -> AsyncIterator[Attachment]:
        """Attaches; inside, the buffers are open. Raises AioRpcError where the target refuses.

        Whoever computes on a GPU has nothing read the buffers any more when it leaves.
        """
        call, answer, buffers = await self._open_best(draft_instance_id)
        released: Outbox[common_pb2.BufferSlice] = Outbox()
        socket: PairSocket | None = None
        writer = asyncio.create_task(_write_releases(call, released))
        try:
            self._slices = SliceReader({buffer_id: buffer.bytes for buffer_id, buffer in buffers.items()})
            self.transport = next((buffer.transport for buffer in buffers.values()), INLINE)
            self._buffer_ids = frozenset(buffers)
            self._unread.clear()
            if buffers:
                socket = _connect(answer.socket_name)
                await call.write(target_pb2.AttachRequest(opened=target_pb2.AttachRequest.BuffersOpened()))
            self._released = released
            yield Attachment(call, answer.target_instance_id, self.transport, socket)
        finally:
            self._released, self._slices, self._buffer_ids = None, SliceReader({}), frozenset()
            for buffer in buffers.values():
                buffer.close()
            if socket is not None:
                socket.shut_down()
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _open_best(
        self, draft_instance_id: str
    ) -> tuple[grpc.aio.StreamStreamCall, target_pb2.AttachResponse, dict[str, SharedBuffer]]:
        """Attaches by the best transport; once more, by the next best, where buffers cannot be opened here."""
        transports = [CUDA_IPC] * (self._device is not None) + [SHARED_MEMORY, INLINE]
        while True:
            call = self.stub.Attach()
            try:
                hello = target_pb2.AttachRequest.AttachDraft(
                    draft_instance_id=draft_instance_id, transports=transports, pair_rounds=True
                )
                await call.write(target_pb2.AttachRequest(draft=hello))
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    raise ConnectionError("the target closed the attachment at once")
                handles = answer.buffers if len(transports) > 1 else []
                return call, answer, _open_buffers(handles, self._device)
            except (OutriderError, CudaError) as error:
                call.cancel()
                failed = answer.buffers[0].transport
                transports = transports[transports.index(failed) + 1 :] if failed in transports[:-1] else [INLINE]
                log.warning("hidden states come by %s: %s", TRANSPORT_NAMES[transports[0]], error)
            except BaseException:
                call.cancel()
                raise

    def resolve(self, slice_: common_pb2.BufferSlice, size: int) -> torch.Tensor:
        """The memory, uint8 [size], of a slice of one of the target's buffers.

        Raises InvalidArgument where it is not inside one.
        """
        try:
            memory = self._slices.resolve(slice_, size)
        except InvalidArgument as error:
            text = error.message.removeprefix(f"{error.field}: ")
            raise InvalidArgument(f"extend.hidden_states.tensor.{error.field}", text) from None
        self._unread.add((slice_.buffer_id, slice_.generation))
        return memory

    def part(self, slice_: common_pb2.BufferSlice, dtype: torch.dtype, count: int, width: int) -> Part | None:
        """The rows of a slice as a part of its buffer; None where it has to be resolved, or refused, as others are."""
        buffer_id = slice_.buffer_id
        if (rows := self._slices.rows(buffer_id, dtype, width)) is None:
            return None
        first, rest = divmod(slice_.offset, rows.row_bytes)
        if rest or first + count > rows.num_rows:
            return None
        self._unread.add((buffer_id, slice_.generation))
        return Part(rows.states, first, count)

    def release(self, slice_: common_pb2.BufferSlice) -> None:
        """Tells the target, soon, that the slice was read; from any thread. Nothing once the attachment ended."""
        self._read.append(slice_)
        if not self._flushing and not self._loop.is_closed():
            self._flushing = True
            self._loop.call_soon_threadsafe(self._loop.call_later, RELEASE_SECONDS, self._flush)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    def _flush(self) -> None:
        self._flushing = False
        while self._read:
            slice_ = self._read.popleft()
            if self._released is not None and slice_.buffer_id in self._buffer_ids:
                self._unread.discard((slice_.buffer_id, slice_.generation))
                self._released.put(slice_)


class Attachment:
    """An open Attach stream."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall,
        target_instance_id: str,
        transport: common_pb2.Transport,
        socket: PairSocket | None = None,
    ) -> None:
        self._call = call
        self.target_instance_id = target_instance_id
        self.transport = transport
        """How its buffers are shared; INLINE for none."""
        self.socket = socket
        """For pair-local rounds, where the target offers them. Shut down at the end of the attachment."""
        self._broken_off = False

    async def ended(self) -> str:
        """Returns, with the reason, when the target ends the stream or goes away, or it is broken off."""
        try:
            while await self._call.read() is not grpc.aio.EOF:
                pass
            return f"{(await self._call.code()).name} {await self._call.details()}"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"
        except asyncio.CancelledError:
            if not self._broken_off:
                raise
            return "the socket towards the target broke"

    def break_off(self) -> None:
        """Ends it, since its socket has ended; harmless where it has ended itself."""
        self._broken_off = True
        self._call.cancel()


def _open_buffers(handles: Iterable[target_pb2.BufferHandle], device: CudaDevice | None) -> dict[str, SharedBuffer]:
    """Opens all buffers, or none. Raises OutriderError or CudaError for the first that cannot be opened here."""
    buffers: dict[str, SharedBuffer] = {}
    try:
        for handle in handles:
            buffers[handle.buffer_id] = open_buffer(handle, device)
    except (OutriderError, CudaError):
        for buffer in buffers.values():
            buffer.close()
        raise
    return buffers


def _connect(socket_name: str) -> PairSocket | None:
    """The socket that the target offers; none, and the gateway drives every round, where that cannot be had."""
    if not socket_name:
        return None
    try:
        return PairSocket.connect(socket_name)
    except OutriderError as error:
        log.warning("rounds are driven by the gateway: %s", error)
        return None


async def _write_releases(call: grpc.aio.StreamStreamCall, released: Outbox[common_pb2.BufferSlice]) -> None:
    """Sends what was released, all that waits in one message for each buffer."""
    while (slices := await released.next_batch()) is not None:
        by_buffer: dict[str, list[int]] = {}
        for slice_ in slices:
            by_buffer.setdefault(slice_.buffer_id, []).append(slice_.generation)
        for buffer_id, generations in by_buffer.items():
            message = target_pb2.AttachRequest.BufferReleased(buffer_id=buffer_id, generations=generations)
            await call.write(target_pb2.AttachRequest(released=message))
