"""Auxiliary hidden states on their way from the model's output to whoever asked for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kernels.transfer import to_host
from outrider.v1 import common_pb2
from target_service.attach import Buffers, write_rows
from target_service.commands import AuxRequest, Rows
from target_service.scheduler import Work
from target_service.sequence import Sequence


def wanted_boundaries(work: Iterable[Work]) -> set[int]:
    """All boundaries that any sequence of a step wants rows of."""
    requests = [(item.sequence.aux, item.start + item.count) for item in work]
    different = {aux.boundaries for aux, end in requests if aux.first_position < end}
    return set().union(*different)


@dataclass(slots=True)
class _Copy:
    """Rows of a step, from `row` on, that go side by side to where `memory` has room from `offset` on.

    Without such memory: to that of the host, for messages; `inline`: each one's rows, and how many.
    """

    boundaries: tuple[int, ...]
    row: int
    count: int
    memory: torch.Tensor | None = None
    offset: int = 0
    num_bytes: int = 0
    inline: list[tuple[Rows, int]] = field(default_factory=list)

    def take_in(self, other: _Copy) -> bool:
        """Whether the other one goes on where this one ends, and is now a part of it."""
        follows = (
            other.row == self.row + self.count
            and other.offset == self.offset + self.num_bytes
            and other.memory is self.memory
            and other.boundaries == self.boundaries
        )
        if follows:
            self.count += other.count
            self.num_bytes += other.num_bytes
            self.inline += other.inline
        return follows


class SentRows:
    """The rows of one step on their way, into slices of buffers that their readers have open, or into messages.

    Slices of sequences that follow each other mostly do so, too, and are written at once, as are those in messages.
    """

    def __init__(self, buffers: Buffers, aux: dict[int, torch.Tensor]) -> None:
        """`aux`: the step's rows by boundary, [T, H] each."""
        self._buffers = buffers
        self._aux = aux
        self._copies: list[_Copy] = []

    def send(self, sequence: Sequence, row: int, start: int, count: int) -> Rows | None:
        """The rows of positions start to start + count - 1, the first of them at `row` of the step.

        None where the sequence wants none of them. They are there once the device has been waited for after `finish`;
        until that is called those for a message are on the device.
        """
        boundaries, skipped = sequence.aux.boundaries, max(sequence.aux.first_position - start, 0)
        if not boundaries or skipped >= count:
            return None
        row, count, first = row + skipped, count - skipped, start + skipped
        states = self._aux[boundaries[0]]
        shape = count, len(boundaries) * states.shape[1]
        if (place := self._buffers.place(sequence, states.dtype, shape)) is None:
            rows = Rows(first, states[row : row + count])
            copy = _Copy(boundaries, row, count, inline=[(rows, count)])
        else:
            rows = Rows(first, place.message)
            num_bytes = math.prod(shape) * states.dtype.itemsize
            copy = _Copy(boundaries, row, count, place.memory, place.offset, num_bytes)
        if not (self._copies and self._copies[-1].take_in(copy)):
            self._copies.append(copy)
        return rows

    def finish(self) -> None:
        """Hands over what is to be written to slices or sent in messages."""
        for copy in self._copies:
            parts = self._parts(copy.boundaries, copy.row, copy.count)
            if copy.memory is not None:
                write_rows(copy.memory, copy.offset, parts)
                continue
            host = to_host(torch.cat(parts, dim=1)).split([count for _, count in copy.inline])
            for (rows, _), part in zip(copy.inline, host, strict=True):
                rows.tensor = part

    def _parts(self, boundaries: tuple[int, ...], row: int, count: int) -> list[torch.Tensor]:
        return [self._aux[boundary][row : row + count] for boundary in boundaries]


class RowSender:
    """Sends rows, takes back what was too much of them, and counts the others."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        # What was emitted and is not counted yet: rows, how many, and what was asked for.
        self._uncounted: list[tuple[Rows, int, AuxRequest]] = []
        self._boundary_bytes = 0  # a row's, of one boundary

    def step(self, aux: dict[int, torch.Tensor]) -> SentRows:
        """For the rows of one step."""
        for states in itertools.islice(aux.values(), 1):
            self._boundary_bytes = states.shape[1] * states.itemsize
        return SentRows(self._buffers, aux)

    def emitted(self, sequence: Sequence, rows: Rows | None, end: int) -> Rows | None:
        """Of rows that were sent those below position `end`: the others stand beyond what a chain emitted."""
        if rows is None:
            return None
        count = end - rows.first_position
        if count <= 0:
            self._buffers.take_back(sequence, rows.tensor)
            return None
        rows = rows.first(count)
        self._uncounted.append((rows, count, sequence.aux))
        return rows

    def count(self) -> dict[common_pb2.Transport, int]:
        """Bytes of what was emitted since the last call: asked once a step, when the draft knows of it."""
        sizes: dict[common_pb2.Transport, int] = {}
        for rows, count, aux in self._uncounted:
            transport = common_pb2.TRANSPORT_INLINE if rows.inline else aux.transport
            sizes[transport] = sizes.get(transport, 0) + count * len(aux.boundaries) * self._boundary_bytes
        self._uncounted.clear()
        return sizes
