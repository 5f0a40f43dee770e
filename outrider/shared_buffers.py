"""Buffers that one process owns and another opens: one class for each kind of memory, the same to whoever uses them.

Device memory (CUDA IPC) is best, where both processes compute on one GPU or on peers; then shared memory of the host,
from which a GPU copies by itself where it can be pinned.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from outrider.cuda_memory import CudaDevice, CudaError
from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.shared_memory import SharedSegment
from outrider.v1 import common_pb2, target_pb2

log = logging.getLogger(__name__)

INLINE = common_pb2.TRANSPORT_INLINE
SHARED_MEMORY = common_pb2.TRANSPORT_SHARED_MEMORY
CUDA_IPC = common_pb2.TRANSPORT_CUDA_IPC
TRANSPORT_NAMES = {INLINE: "inline", SHARED_MEMORY: "shared_memory", CUDA_IPC: "cuda_ipc"}
"""Values of the label `transport`."""


class SharedBuffer(Protocol):
    """One buffer, at its owner or at its reader."""

    transport: common_pb2.Transport
    bytes: torch.Tensor
    """All of it, uint8 [size]; to write to for the owner only."""

    def handle(self, buffer_id: str) -> target_pb2.BufferHandle:
        """How another process opens it."""

    def unlink(self) -> None:
        """The reader has it open: nobody else can open it from now on, where that can be had."""

    def close(self) -> None:
        """Gives it back. Device memory must not be read any more."""


class HostBuffer:
    """Shared memory of the host, pinned for `device` where there is one and it takes it."""

    transport = SHARED_MEMORY

    def __init__(self, segment: SharedSegment, device: CudaDevice | None, read_only: bool) -> None:
        self._segment = segment
        self.bytes = segment.bytes
        self._pinned_for = device
        if device is not None:
            try:
                device.pin(self.bytes.data_ptr(), len(self.bytes), read_only)
            except CudaError as error:
                log.info("shared memory is copied by the processor: %s", error)
                self._pinned_for = None

    def handle(self, buffer_id: str) -> target_pb2.BufferHandle:
        """The segment's name."""
        return target_pb2.BufferHandle(
            buffer_id=buffer_id, transport=SHARED_MEMORY, handle=self._segment.name.encode(), size=len(self.bytes)
        )

    def unlink(self) -> None:
        """Takes the segment's name away."""
        self._segment.unlink()

    def close(self) -> None:
        """Unmaps it once the last tensor that views it is gone."""
        if self._pinned_for is not None:
            self._pinned_for.unpin(self.bytes.data_ptr())
            self._pinned_for = None
        self.bytes = self.bytes[:0].clone()
        self._segment.close()


class DeviceBuffer:
    """Device memory that this process owns. Raises CudaError where there is no room, or it cannot be shared.

    Once another process may have it open it must not be closed, but used again: freeing it under a reader is undefined.
    """

    transport = CUDA_IPC

    def __init__(self, device: CudaDevice, size: int) -> None:
        self._device = device
        self._address = device.malloc(size)
        try:
            self._handle = device.export(self._address)
        except CudaError:
            device.free(self._address)
            raise
        self.bytes = device.tensor(self._address, size)

    def handle(self, buffer_id: str) -> target_pb2.BufferHandle:
        """The IPC handle, and whose memory it is."""
        return target_pb2.BufferHandle(
            buffer_id=buffer_id,
            transport=CUDA_IPC,
            handle=self._handle,
            size=len(self.bytes),
            device_uuid=self._device.uuid,
        )

    def unlink(self) -> None:
        """A handle cannot be taken back."""

    def close(self) -> None:
        """Frees it, where nobody has opened it."""
        self._device.free(self._address)


class OpenedDeviceBuffer:
    """Device memory of another process, opened for `device`, whose kernels read it where it is."""

    transport = CUDA_IPC

    def __init__(self, device: CudaDevice, handle: target_pb2.BufferHandle) -> None:
        """Raises FailedPrecondition, InvalidArgument or CudaError for what cannot be opened from here."""
        if not device.reaches(handle.device_uuid):
            raise FailedPrecondition(
                f"device memory: expected that of {device.uuid} or of a peer, found that of {handle.device_uuid}"
            )
        self._device = device
        try:
            self._address: int | None = device.open(handle.handle)
        except ValueError as error:
            raise InvalidArgument("buffers", str(error)) from None
        self.bytes = device.tensor(self._address + handle.offset, handle.size)
        self.is_local = handle.device_uuid == device.uuid
        """Whether it is the device's own memory, and not a peer's."""
        self._handle = handle

    def handle(self, buffer_id: str) -> target_pb2.BufferHandle:
        """As its owner gave it."""
        return self._handle

    def unlink(self) -> None:
        """Its owner's to do."""

    def close(self) -> None:
        """Closes it, once. Whatever read it must have been waited for."""
        if self._address is not None:
            self._device.close(self._address)
            self._address = None


def open_buffer(handle: target_pb2.BufferHandle, device: CudaDevice | None) -> HostBuffer | OpenedDeviceBuffer:
    """Opens a buffer of another process, for a reader that computes on `device` (None: on a CPU).

    Raises FailedPrecondition, InvalidArgument or CudaError for what cannot be opened from here.
    """
    if handle.transport == SHARED_MEMORY and not handle.offset:
        segment = SharedSegment.open(handle.handle.decode(errors="replace"), handle.size)
        return HostBuffer(segment, device, read_only=True)
    if handle.transport != CUDA_IPC or device is None:
        raise InvalidArgument("buffers", f"expected memory that can be opened here, found {handle}")
    return OpenedDeviceBuffer(device, handle)
