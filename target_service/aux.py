"""Auxiliary hidden states on their way from the model's output to whoever asked for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kernels.transfer import to_host
from outrider.v1 import common_pb2
from target_service.attach import Buffers
from target_service.commands import Rows
from target_service.metrics import TargetMetrics
from target_service.scheduler import Work
from target_service.sequence import Sequence


def wanted_boundaries(work: Iterable[Work]) -> set[int]:
    """All boundaries that any sequence of a step wants rows of."""
    requests = [(item.sequence.aux, item.start + item.count) for item in work]
    different = {aux.boundaries for aux, end in requests if aux.first_position < end}
    return set().union(*different)


class RowSender:
    """Puts rows where their reader finds them: into a slice of a buffer that it has open, or into the message."""

    def __init__(self, buffers: Buffers, metrics: TargetMetrics) -> None:
        self._buffers = buffers
        self._metrics = metrics
        # Bytes that were emitted and are not counted yet.
        self._uncounted: dict[common_pb2.Transport, int] = {}

    def send(
        self, sequence: Sequence, aux: dict[int, torch.Tensor], batch_row: int, start: int, count: int
    ) -> Rows | None:
        """The rows of positions start to start + count - 1, the first of them at `batch_row` of each tensor of `aux`.

        None where the sequence wants none of them. They are there once the device has been waited for.
        """
        request = sequence.aux
        skipped = max(request.first_position - start, 0)
        if not request.boundaries or skipped >= count:
            return None
        parts = [aux[boundary][batch_row + skipped : batch_row + count] for boundary in request.boundaries]
        if (place := self._buffers.write(sequence, parts)) is not None:
            return Rows(start + skipped, place)
        return Rows(start + skipped, to_host(torch.cat(parts, dim=1)))

    def emitted(self, sequence: Sequence, rows: Rows | None, end: int) -> Rows | None:
        """Of rows that were sent those below position `end`: the others stand beyond what a chain emitted."""
        if rows is None:
            return None
        count = end - rows.first_position
        if count <= 0:
            self._buffers.take_back(sequence, rows.tensor)
            return None
        rows = rows.first(count)
        transport = common_pb2.TRANSPORT_INLINE if rows.inline else sequence.aux.transport
        self._uncounted[transport] = self._uncounted.get(transport, 0) + rows.num_bytes
        return rows

    def count(self) -> None:
        """Counts what was emitted: once a step, when the draft knows of it."""
        for transport, size in self._uncounted.items():
            self._metrics.hidden_state_bytes(transport, size)
        self._uncounted.clear()
