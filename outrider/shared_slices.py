"""Slices of a shared buffer: the writer hands them out in a ring, the reader checks them before it looks."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import InvalidArgument
from outrider.v1.common_pb2 import BufferSlice

RETIREMENT_SECONDS = 1.5
"""How long slices of a sequence that was freed or re-aimed stay intact: they may never reach a reader."""

_ALIGNMENT = 64  # of what the writer hands out: a cache line
_ELEMENT_ALIGNMENT = 8  # of what the reader takes: the widest element of the contract


class Slice(NamedTuple):
    """A part of a buffer, as BufferSlice names it."""

    offset: int
    generation: int


@dataclass(slots=True)
class _HandedOut:
    start: int  # in bytes since the ring began; modulo its size it is the offset
    owner: Hashable
    released: bool = False


class SliceWriter:
    """Hands out slices of a buffer and takes them back in any order. Safe to use from several threads.

    Space is reused in the order in which it was handed out. Nothing here waits: with no room there is no slice.
    """

    def __init__(self, memory: Tensor, clock: Callable[[], float] = time.monotonic) -> None:
        """`memory` is all of the buffer, uint8 [size], on whichever device."""
        self._memory = memory
        self._size = len(memory)
        self._clock = clock
        self._lock = threading.Lock()
        self._head = 0  # where the next slice starts, in bytes since the ring began
        self._newest = 0
        self._handed_out: dict[int, _HandedOut] = {}  # by generation, oldest first
        self._retiring: deque[tuple[float, list[int]]] = deque()
        self._num_unreleased = 0

    @property
    def num_unreleased(self) -> int:
        """Slices handed out and neither released nor retired."""
        with self._lock:
            self._retire_what_is_due()
            return self._num_unreleased

    def write(self, tensor: Tensor, owner: Hashable) -> Slice | None:
        """Copies a tensor's elements, row-major, into a slice of `owner`'s; None when there is no room."""
        granted = self.allocate(tensor.nbytes, owner)
        if granted is not None:
            tensor_at(self._memory, granted.offset, tensor.dtype, tensor.shape).copy_(tensor)
        return granted

    def allocate(self, num_bytes: int, owner: Hashable) -> Slice | None:
        """A slice of at least `num_bytes`, on a 64-byte boundary, for the sequence `owner`; None with no room."""
        with self._lock:
            self._retire_what_is_due()
            length = _ALIGNMENT * max(1, math.ceil(num_bytes / _ALIGNMENT))
            start = self._head
            if start % self._size + length > self._size:  # a slice does not wrap: it starts at the front
                start += self._size - start % self._size
            oldest = next((slice_.start for slice_ in self._handed_out.values()), start)
            if start + length - oldest > self._size:
                return None
            self._head = start + length
            self._newest += 1
            self._handed_out[self._newest] = _HandedOut(start, owner)
            self._num_unreleased += 1
            return Slice(start % self._size, self._newest)

    def release(self, generations: Iterable[int]) -> None:
        """Takes back slices that were read. One that was released or retired before is left as it is.

        Raises InvalidArgument for a generation that was never handed out, having taken those before it.
        """
        with self._lock:
            for generation in generations:
                if not 1 <= generation <= self._newest:
                    raise InvalidArgument(
                        "released.generations", f"expected 1 to {self._newest}, found {generation}, never handed out"
                    )
                self._free(generation)
            self._reuse()

    def retire(self, owner: Hashable) -> None:
        """Frees what `owner`, whose sequence was freed or re-aimed, has out, 1.5 s from now."""
        with self._lock:
            left = [number for number, s in self._handed_out.items() if s.owner == owner]
            if left:
                self._retiring.append((self._clock() + RETIREMENT_SECONDS, left))

    def _retire_what_is_due(self) -> None:
        now = self._clock()
        while self._retiring and self._retiring[0][0] <= now:
            for generation in self._retiring.popleft()[1]:
                self._free(generation)
        self._reuse()

    def _free(self, generation: int) -> None:
        slice_ = self._handed_out.get(generation)
        if slice_ is not None and not slice_.released:
            slice_.released = True
            self._num_unreleased -= 1

    def _reuse(self) -> None:
        while self._handed_out:
            oldest = next(iter(self._handed_out))
            if not self._handed_out[oldest].released:
                return
            del self._handed_out[oldest]


class BufferRows(NamedTuple):
    """A buffer as rows [num_rows, width], as many as fit from its beginning on, of `row_bytes` each.

    Numbers stand beside the tensor since asking it for them takes long.
    """

    states: Tensor
    num_rows: int
    row_bytes: int


class SliceReader:
    """Resolves slices of the buffers that were opened, by their ids: `resolve` is a tensors.SliceResolver."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        """`buffers` are uint8 [size] each."""
        self._buffers = dict(buffers)
        self._rows: dict[tuple[str, torch.dtype, int], BufferRows] = {}

    def resolve(self, slice_: BufferSlice, num_bytes: int) -> Tensor:
        """The bytes of a slice, as a view uint8 [num_bytes].

        Raises InvalidArgument unless the buffer is open and the slice aligned and inside.
        """
        memory = self._buffers.get(slice_.buffer_id)
        if memory is None:
            raise InvalidArgument(
                "slice.buffer_id", f"expected one of {sorted(self._buffers)}, found {slice_.buffer_id!r}"
            )
        return checked_slice(memory, slice_.offset, num_bytes)

    def rows(self, buffer_id: str, dtype: torch.dtype, width: int) -> BufferRows | None:
        """All of a buffer as rows, the same tensor each time; None where it is not open, or some would not be aligned.

        What was asked for is kept: let it be of a few types and widths.
        """
        key, size = (buffer_id, dtype, width), width * dtype.itemsize
        rows = self._rows.get(key)
        if rows is None and size % _ELEMENT_ALIGNMENT == 0 and (memory := self._buffers.get(buffer_id)) is not None:
            count = len(memory) // size
            rows = self._rows[key] = BufferRows(tensor_at(memory, 0, dtype, (count, width)), count, size)
        return rows


def checked_slice(memory: Tensor, offset: int, num_bytes: int) -> Tensor:
    """The `num_bytes` from `offset` on. Raises InvalidArgument unless they are aligned and inside the buffer."""
    if offset % _ELEMENT_ALIGNMENT:
        raise InvalidArgument("slice.offset", f"expected a multiple of {_ELEMENT_ALIGNMENT}, found {offset}")
    if offset < 0 or num_bytes < 0 or offset + num_bytes > memory.numel():
        raise InvalidArgument(
            "slice.offset", f"expected {num_bytes} bytes inside a buffer of {len(memory)}, found them at {offset}"
        )
    return memory.narrow(0, offset, num_bytes)  # a part of what slicing by index costs


def tensor_at(memory: Tensor, offset: int, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    """The tensor that lies at `offset`, row-major, as a view. Raises InvalidArgument as `checked_slice` does."""
    shape = tuple(shape)
    if any(size < 0 for size in shape):
        raise InvalidArgument("shape", f"expected no negative dimension, found {list(shape)}")
    return checked_slice(memory, offset, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
