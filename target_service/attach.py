"""Buffers through which co-located drafts read hidden states.

Each attached draft has one, in the best kind of memory that both can open. The engine writes slices into it and never
waits for a reader: a draft that has not opened its buffer yet, wants another transport, or has no room left is served
inline.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.transfer import wait
from outrider.cuda_memory import CudaDevice, CudaError
from outrider.errors import InvalidArgument
from outrider.pair_socket import FEATURE, PairListener, PairSocket, sweep_stale_sockets
from outrider.shared_buffers import CUDA_IPC, INLINE, SHARED_MEMORY, DeviceBuffer, HostBuffer, SharedBuffer
from outrider.shared_memory import SharedSegment, sweep_stale_segments
from outrider.shared_slices import SliceWriter, tensor_at
from outrider.tensors import reference
from outrider.v1 import common_pb2, target_pb2
from target_service.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Attachment:
    """One draft's buffer. Slices are written once the draft has opened it."""

    buffer_id: str
    memory: SharedBuffer
    writer: SliceWriter
    # Where the draft connects for pair-local rounds, until it has.
    listener: PairListener | None = None
    opened: bool = False

    @property
    def handle(self) -> target_pb2.BufferHandle:
        """How the draft opens it."""
        return self.memory.handle(self.buffer_id)

    def set_opened(self) -> PairSocket | None:
        """The draft has it: its name may go. Returns the socket where the draft has connected to one."""
        self.memory.unlink()
        self.opened = True
        listener, self.listener = self.listener, None
        return listener.accept() if listener is not None else None

    def release(self, message: target_pb2.AttachRequest.BufferReleased) -> None:
        """Slices were read. Raises InvalidArgument for another buffer, or for a slice that was never handed out."""
        if message.buffer_id != self.buffer_id:
            raise InvalidArgument("released.buffer_id", f"expected {self.buffer_id}, found {message.buffer_id!r}")
        self.writer.release(message.generations)


@dataclass(slots=True)
class Place:
    """Where rows go: from `offset` on in `memory`, uint8 [size], and how a message says so."""

    memory: torch.Tensor
    offset: int
    message: common_pb2.Tensor


def write_rows(memory: torch.Tensor, offset: int, parts: list[torch.Tensor]) -> None:
    """Puts rows [n, H] of several boundaries side by side, from `offset` on.

    They are there once the device has been waited for: until then no message may say so, since the message is all that
    orders the reader, another process, after the copy.
    """
    shape = len(parts[0]), sum(part.shape[1] for part in parts)
    room = tensor_at(memory, offset, parts[0].dtype, shape)
    if room.device == parts[0].device:
        torch.cat(parts, dim=1, out=room)
    else:
        room.copy_(torch.cat(parts, dim=1), non_blocking=True)


class Buffers:
    """The buffers of all attached drafts, by the instance that reads them.

    `attach` and `detach` run on the event loop; the others in the engine's thread, which alone touches the memory.
    """

    def __init__(
        self,
        instance_id: str,
        size: int,
        group: str | None = None,
        device: CudaDevice | None = None,
        device_size: int = 0,
    ) -> None:
        """`size` is that of each buffer, in bytes, 0 for none; members of `group` may read them, too.

        `device`: where the states are computed, None for a CPU; buffers in its memory have `device_size` at least. The
        first buffer of each kind is allocated at once: raises OSError where there is no room, ValueError for an unknown
        group.
        """
        self._instance_id = instance_id
        self._device = device
        self._group = group
        self._attachments: dict[str, Attachment] = {}
        self._num_created = 0
        self._spares: dict[common_pb2.Transport, list[SharedBuffer]] = {}
        self._kinds: dict[common_pb2.Transport, Callable[[], SharedBuffer]] = {}
        if size:
            sweep_stale_segments()
            sweep_stale_sockets()
            self._kinds[SHARED_MEMORY] = lambda: HostBuffer(SharedSegment.create(size, group), device, read_only=False)
            self._spares[SHARED_MEMORY] = [self._kinds[SHARED_MEMORY]()]
        if size and device is not None:
            try:
                self._spares[CUDA_IPC] = [DeviceBuffer(device, max(size, device_size))]
                self._kinds[CUDA_IPC] = lambda: DeviceBuffer(device, max(size, device_size))
            except CudaError as error:
                log.warning("no device memory is shared: %s", error)

    @property
    def transports(self) -> list[common_pb2.Transport]:
        """What this target offers, best first."""
        return [transport for transport in (CUDA_IPC, SHARED_MEMORY) if transport in self._kinds] + [INLINE]

    @property
    def features(self) -> list[str]:
        """Optional parts of the contract that the buffers make possible."""
        return [FEATURE] * bool(self._kinds)

    @property
    def num_attached(self) -> int:
        """Drafts that have a buffer."""
        return len(self._attachments)

    @property
    def num_unreleased(self) -> int:
        """Slices that no reader has released yet."""
        return sum(attachment.writer.num_unreleased for attachment in self._attachments.copy().values())

    def attach(self, draft: target_pb2.AttachRequest.AttachDraft) -> Attachment | None:
        """A buffer for a draft, of the best kind that both have; None where only INLINE works between the two."""
        for transport in self.transports:
            if transport not in self._kinds or transport not in draft.transports:
                continue
            try:
                spares = self._spares[transport]
                memory = spares.pop() if spares else self._kinds[transport]()
            except OSError as error:
                log.error("draft %s gets no buffer: %s", draft.draft_instance_id, error)
                continue
            self._num_created += 1
            attachment = Attachment(f"{self._instance_id}/{self._num_created}", memory, SliceWriter(memory.bytes))
            if draft.pair_rounds:
                attachment.listener = self._listen()
            self._attachments[draft.draft_instance_id] = attachment
            return attachment
        return None

    def detach(self, draft_instance_id: str, attachment: Attachment) -> None:
        """The draft went away. One that has attached anew keeps its new buffer."""
        if attachment.listener is not None:
            attachment.listener.close()
        if self._attachments.get(draft_instance_id) is attachment:
            del self._attachments[draft_instance_id]

    def place(self, sequence: Sequence, dtype: torch.dtype, shape: tuple[int, int]) -> Place | None:
        """A slice for rows of a sequence; None where they have to go inline."""
        attachment = self._attachment(sequence)
        if attachment is None:
            return None
        granted = attachment.writer.allocate(math.prod(shape) * dtype.itemsize, sequence)
        if granted is None:
            return None
        slice_ = common_pb2.BufferSlice(
            buffer_id=attachment.buffer_id, offset=granted.offset, generation=granted.generation
        )
        return Place(attachment.memory.bytes, granted.offset, reference(dtype, shape, slice_))

    def take_back(self, sequence: Sequence, rows: torch.Tensor | common_pb2.Tensor) -> None:
        """Rows that were written for the sequence are not sent after all. A draft may have attached anew meanwhile."""
        attachment = self._attachment(sequence)
        if attachment is None or isinstance(rows, torch.Tensor):
            return
        if rows.slice.buffer_id == attachment.buffer_id:
            attachment.writer.release([rows.slice.generation])

    def abandon(self, sequence: Sequence) -> None:
        """The sequence was freed or re-aimed: what its slices hold may never be read, and is free a little later."""
        if attachment := self._attachment(sequence):
            attachment.writer.retire(sequence)

    def close(self, attachment: Attachment) -> None:
        """Takes back a buffer whose draft went away. Device memory, which it may have open still, is used again."""
        if attachment.memory.transport == CUDA_IPC:
            self._spares[CUDA_IPC].append(attachment.memory)
            return
        if self._device is not None:
            wait(self._device.device)  # a step that is queued may still write to it
        attachment.memory.close()

    def close_all(self) -> None:
        """Unmaps the host's memory at the end of the process, and takes away the names that are left."""
        attached = [attachment.memory for attachment in self._attachments.values()]
        for memory in [*self._spares.get(SHARED_MEMORY, []), *attached]:
            if memory.transport == SHARED_MEMORY:
                memory.close()

    def _listen(self) -> PairListener | None:
        try:
            return PairListener(self._group)
        except OSError as error:
            log.error("rounds are driven by the gateway: %s", error)
            return None

    def _attachment(self, sequence: Sequence) -> Attachment | None:
        """The buffer that the sequence's rows go into, if there is one and its reader has opened it."""
        attachment = self._attachments.get(sequence.aux.draft_instance_id)
        if attachment is None or not attachment.opened or attachment.memory.transport != sequence.aux.transport:
            return None
        return attachment
