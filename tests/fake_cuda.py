"""A CUDA runtime for processes without a device: what it allocates lies in files, so that another process can open it.

`python -m tests.fake_cuda SERVICE FLAGS...` runs a service whose device is such a one. The environment says where the
files are (FAKE_CUDA), which device the process has (FAKE_CUDA_DEVICE), which others it reaches (FAKE_CUDA_PEERS), and
which calls fail (FAKE_CUDA_FAILS). Whoever reads what was freed or closed finds bytes of 255, NaN in every float type.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import runpy
import secrets
import sys
from collections.abc import Collection
from pathlib import Path

import torch

from outrider import cuda_memory
from outrider.cuda_memory import CudaDevice

_ERRORS = {1: "cudaErrorInvalidValue", 205: "cudaErrorMapBufferObjectFailed"}
_INVALID_VALUE, _CANNOT_MAP = _ERRORS
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class FakeLibrary:
    """The calls of libcudart that cuda_memory makes, with the arguments that it gives. `calls` are their names."""

    def __init__(self, directory: Path, fails: Collection[str] = ()) -> None:
        self._directory = directory
        self._fails = fails
        self._owned: dict[int, Path] = {}
        self._opened: dict[int, Path] = {}
        self._times_opened: dict[int, int] = {}
        self._registered: set[int] = set()
        self.calls: list[str] = []

    def __getattribute__(self, name: str):
        if name.startswith("cuda"):
            self.calls.append(name)
            if name in self._fails:
                return lambda *arguments: _INVALID_VALUE
        return object.__getattribute__(self, name)

    def cudaSetDevice(self, device):
        return 0

    def cudaGetLastError(self):
        return 0

    def cudaGetErrorName(self, code):
        return _ERRORS[code.value].encode()

    def cudaGetErrorString(self, code):
        return b"as the test wants it"

    def cudaMalloc(self, reference, size):
        path = self._directory / secrets.token_hex(16)
        path.write_bytes(b"")
        os.truncate(path, size.value)
        address = reference._obj.value = _map_file(path)
        self._owned[address] = path
        return 0

    def cudaFree(self, pointer):
        path = self._owned.pop(pointer.value)
        ctypes.memset(pointer.value, 255, path.stat().st_size)
        path.unlink()
        return 0

    def cudaIpcGetMemHandle(self, reference, pointer):
        if pointer.value not in self._owned:
            return _INVALID_VALUE
        ctypes.memmove(reference, self._owned[pointer.value].name.encode(), 32)
        return 0

    def cudaIpcOpenMemHandle(self, reference, handle, flags):
        path = self._directory / bytes(handle).rstrip(b"\0").decode(errors="replace")
        # A process cannot open what it has exported itself; what it has open it gets once more.
        if path in self._owned.values() or not path.is_file():
            return _CANNOT_MAP
        address = next((a for a, opened in self._opened.items() if opened == path), None) or _map_file(path)
        self._opened[address] = path
        self._times_opened[address] = self._times_opened.get(address, 0) + 1
        reference._obj.value = address
        return 0

    def cudaIpcCloseMemHandle(self, pointer):
        self._times_opened[pointer.value] -= 1
        if not self._times_opened[pointer.value]:
            size = self._opened.pop(pointer.value).stat().st_size
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _libc.mmap(pointer.value, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            ctypes.memset(pointer.value, 255, size)
        return 0

    def cudaHostRegister(self, pointer, size, flags):
        if pointer.value in self._registered:
            return _INVALID_VALUE
        self._registered.add(pointer.value)
        return 0

    def cudaHostUnregister(self, pointer):
        self._registered.remove(pointer.value)
        return 0


class FakeDevice(CudaDevice):
    """A device whose tensors lie in the processor's memory."""

    def __init__(self, directory: Path, uuid: str = "one", peers: Collection[str] = (), fails: Collection[str] = ()):
        super().__init__(torch.device("cpu"), FakeLibrary(directory, fails))
        self._uuid = uuid
        self._peers = peers

    @property
    def calls(self) -> list[str]:
        """What was asked of the runtime so far."""
        return self._library.calls

    @property
    def uuid(self) -> str:
        return self._uuid

    def reaches(self, uuid: str) -> bool:
        return uuid == self._uuid or uuid in self._peers


def fake_device_of_environment() -> FakeDevice:
    """As the environment says."""
    directory, uuid, *lists = (os.environ.get(f"FAKE_CUDA{part}", "") for part in ("", "_DEVICE", "_PEERS", "_FAILS"))
    return FakeDevice(Path(directory), uuid or "one", *(text.split() for text in lists))


def _map_file(path: Path) -> int:
    with path.open("rb+") as file:
        size = os.fstat(file.fileno()).st_size
        return _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0)


if __name__ == "__main__":
    fake = fake_device_of_environment()
    cuda_memory.sharing_device = lambda device: fake
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__")
