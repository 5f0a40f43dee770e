"""Device memory that processes of one host share (CUDA IPC), and host memory that a device copies from by itself.

PyTorch has no names for these calls, so they go to the CUDA runtime that it has loaded. Each buffer is a cudaMalloc of
its own: the handle of a part of PyTorch's pools would open all that lies beside it.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

from outrider.dlpack import tensor_over

log = logging.getLogger(__name__)

HANDLE_BYTES = 64
# cudaMalloc cuts smaller ones from a block of this size, all of which a handle would open (CUDA C Programming Guide,
# Interprocess Communication).
_BLOCK_BYTES = 2 << 20

_LAZY_ENABLE_PEER_ACCESS = 1
_REGISTER_PORTABLE, _REGISTER_READ_ONLY = 1, 8


class CudaError(OSError):
    """A call of the CUDA runtime failed."""


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


class CudaDevice:
    """One device, and the calls of `library`, the CUDA runtime, that share memory with other processes. Any thread."""

    def __init__(self, device: torch.device, library: Any) -> None:
        self.device = device
        """Where tensors over its memory say that they lie, memory that a peer device owns included."""
        self._library = library

    @property
    def uuid(self) -> str:
        """Which device it is, for every process of the host."""
        return _uuid(self.device.index)

    def reaches(self, uuid: str) -> bool:
        """Whether its kernels can read the memory of the device `uuid`: itself, or a peer that is visible here."""
        own = self.device.index
        others = (index for index in range(torch.cuda.device_count()) if _uuid(index) == uuid)
        return any(index == own or torch.cuda.can_device_access_peer(own, index) for index in others)

    def malloc(self, size: int) -> int:
        """The address of `size` new bytes in a block of their own. Raises CudaError."""
        address, blocks = ctypes.c_void_p(), -(-size // _BLOCK_BYTES)
        arguments = ctypes.byref(address), ctypes.c_size_t(blocks * _BLOCK_BYTES)
        try:
            self._call("cudaMalloc", *arguments)
        except CudaError:
            torch.cuda.empty_cache()  # what PyTorch has freed it keeps
            self._call("cudaMalloc", *arguments)
        return _address(address)

    def free(self, address: int) -> None:
        """Frees what `malloc` gave and nobody else has open."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def export(self, address: int) -> bytes:
        """The handle by which other processes open what `malloc` gave. Raises CudaError where that is not possible."""
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address here of what another process has exported. Raises CudaError, ValueError for no handle."""
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"handle: expected {HANDLE_BYTES} bytes, found {len(handle)}")
        address = ctypes.c_void_p()
        opened = IpcHandle.from_buffer_copy(handle)
        flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), opened, flags)
        return _address(address)

    def close(self, address: int) -> None:
        """Closes what `open` gave, as often as it was opened. Nothing may read it any more."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def pin(self, address: int, size: int, read_only: bool) -> None:
        """Has the device copy from and to this host memory by itself. Raises CudaError where it cannot."""
        flags = _REGISTER_PORTABLE | (_REGISTER_READ_ONLY if read_only else 0)
        self._call("cudaHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(flags))

    def unpin(self, address: int) -> None:
        """Takes `pin` back."""
        self._call("cudaHostUnregister", ctypes.c_void_p(address))

    def tensor(self, address: int, size: int) -> torch.Tensor:
        """Device memory as a tensor uint8 [size]; see `tensor_over`."""
        return tensor_over(address, size, self.device)

    def _call(self, name: str, *arguments: Any) -> None:
        library = self._library
        code = library.cudaSetDevice(ctypes.c_int(self.device.index or 0))
        code = code or getattr(library, name)(*arguments)
        if code:
            library.cudaGetLastError()  # else PyTorch finds it after its next kernel, and takes it for that one's
            text = library.cudaGetErrorString(ctypes.c_int(code)).decode()
            raise CudaError(f"{name}: {text} ({library.cudaGetErrorName(ctypes.c_int(code)).decode()})")


def sharing_device(device: torch.device) -> CudaDevice | None:
    """How the memory of `device` is shared with other processes; None where it is no CUDA device, or cannot be."""
    if device.type != "cuda":
        return None
    try:
        library = load_library(torch._C.__file__)
    except AttributeError as error:
        log.warning("no device memory is shared: %s", error)
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaDevice(torch.device("cuda", index), library)


def load_library(path: str) -> ctypes.CDLL:
    """The CUDA runtime that the library at `path` is, or depends on: dlsym looks through its dependencies, too.

    Raises AttributeError where there is none.
    """
    library = ctypes.CDLL(path)
    for name in ("cudaGetErrorString", "cudaGetErrorName"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _address(pointer: ctypes.c_void_p) -> int:
    assert pointer.value is not None, "the runtime gave no address, and no error"
    return pointer.value
