"""Auxiliary hidden states on their way from the model's output to whoever asked for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outrider.v1 import common_pb2
from target_service.attach import Buffers
from target_service.commands import Rows
from target_service.metrics import TargetMetrics
from target_service.scheduler import Work
from target_service.sequence import Sequence


def wanted_boundaries(work: Iterable[Work]) -> set[int]:
    """All boundaries that any sequence of a step wants rows of."""
    return {
        boundary
        for item in work
        if item.sequence.aux.first_position < item.start + item.count
        for boundary in item.sequence.aux.boundaries
    }


class RowSender:
    """Puts rows where their reader finds them: into a slice of a buffer that it has open, or into the message."""

    def __init__(self, buffers: Buffers, metrics: TargetMetrics) -> None:
        self._buffers = buffers
        self._metrics = metrics

    def send(
        self, sequence: Sequence, aux: dict[int, torch.Tensor], batch_row: int, start: int, count: int
    ) -> Rows | None:
        """The rows of positions start to start + count - 1, the first of them at `batch_row` of each tensor of `aux`.

        None where the sequence wants none of them.
        """
        request = sequence.aux
        skipped = max(request.first_position - start, 0)
        if not request.boundaries or skipped >= count:
            return None
        parts = [aux[boundary][batch_row + skipped : batch_row + count] for boundary in request.boundaries]
        size = sum(part.numel() for part in parts) * parts[0].element_size()
        if (place := self._buffers.write(sequence, parts)) is not None:
            self._metrics.hidden_state_bytes(request.transport, size)
            return Rows(start + skipped, place)
        self._metrics.hidden_state_bytes(common_pb2.TRANSPORT_INLINE, size)
        return Rows(start + skipped, torch.cat(parts, dim=1).cpu())
