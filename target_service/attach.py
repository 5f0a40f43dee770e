"""Buffers through which co-located drafts read hidden states.

Each attached draft has one, in shared memory. The engine writes slices into it and never waits: a draft that has not
opened its buffer yet, wants another transport, or has no room left is served inline.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from outrider.errors import InvalidArgument
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
    segment: SharedSegment
    writer: SliceWriter
    opened: bool = False

    @property
    def handle(self) -> target_pb2.BufferHandle:
        """How the draft opens it."""
        return target_pb2.BufferHandle(
            buffer_id=self.buffer_id,
            transport=common_pb2.TRANSPORT_SHARED_MEMORY,
            handle=self.segment.name.encode(),
            size=len(self.segment.view),
        )

    def set_opened(self) -> None:
        """The draft has it: its name may go."""
        self.segment.unlink()
        self.opened = True

    def release(self, message: target_pb2.AttachRequest.BufferReleased) -> None:
        """Slices were read. Raises InvalidArgument for another buffer, or for a slice that was never handed out."""
        if message.buffer_id != self.buffer_id:
            raise InvalidArgument("released.buffer_id", f"expected {self.buffer_id}, found {message.buffer_id!r}")
        self.writer.release(message.generations)


class Buffers:
    """The buffers of all attached drafts, by the instance that reads them.

    `attach` and `detach` run on the event loop; `write`, `abandon` and `close` in the engine's thread, which alone
    touches the memory.
    """

    def __init__(self, instance_id: str, size: int, group: str | None = None) -> None:
        """`size` is that of each buffer, in bytes, 0 for none; members of `group` may read them, too.

        The first one is allocated at once: raises OSError where there is no room, ValueError for an unknown group.
        """
        self._instance_id = instance_id
        self._size = size
        self._group = group
        self._attachments: dict[str, Attachment] = {}
        self._num_created = 0
        self._spare: SharedSegment | None = None
        if size:
            sweep_stale_segments()
            self._spare = SharedSegment.create(size, group)

    @property
    def transports(self) -> list[common_pb2.Transport]:
        """What this target offers, best first."""
        return [common_pb2.TRANSPORT_SHARED_MEMORY] * bool(self._size) + [common_pb2.TRANSPORT_INLINE]

    @property
    def num_attached(self) -> int:
        """Drafts that have a buffer."""
        return len(self._attachments)

    @property
    def num_unreleased(self) -> int:
        """Slices that no reader has released yet."""
        return sum(attachment.writer.num_unreleased for attachment in self._attachments.copy().values())

    def attach(self, draft: target_pb2.AttachRequest.AttachDraft) -> Attachment | None:
        """A buffer for a draft; None where nothing but INLINE works between the two."""
        if not self._size or common_pb2.TRANSPORT_SHARED_MEMORY not in draft.transports:
            return None
        try:
            segment = self._spare or SharedSegment.create(self._size, self._group)
        except OSError as error:
            log.error("draft %s is served inline: %s", draft.draft_instance_id, error)
            return None
        self._spare = None
        self._num_created += 1
        attachment = Attachment(f"{self._instance_id}/{self._num_created}", segment, SliceWriter(segment.view))
        self._attachments[draft.draft_instance_id] = attachment
        return attachment

    def detach(self, draft_instance_id: str, attachment: Attachment) -> None:
        """The draft went away. One that has attached anew keeps its new buffer."""
        if self._attachments.get(draft_instance_id) is attachment:
            del self._attachments[draft_instance_id]

    def write(self, sequence: Sequence, parts: list[torch.Tensor]) -> common_pb2.Tensor | None:
        """Puts rows [n, H] of several boundaries side by side into a slice; None where they have to go inline."""
        attachment = self._attachment(sequence)
        if attachment is None:
            return None
        shape = (len(parts[0]), sum(part.shape[1] for part in parts))
        dtype = parts[0].dtype
        granted = attachment.writer.allocate(math.prod(shape) * dtype.itemsize, sequence)
        if granted is None:
            return None
        memory = tensor_at(attachment.segment.view, granted.offset, dtype, shape)
        column = 0
        for part in parts:
            memory[:, column : column + part.shape[1]] = part
            column += part.shape[1]
        place = common_pb2.BufferSlice(
            buffer_id=attachment.buffer_id, offset=granted.offset, generation=granted.generation
        )
        return reference(dtype, shape, place)

    def take_back(self, sequence: Sequence, rows: torch.Tensor | common_pb2.Tensor) -> None:
        """Rows that were written for the sequence are not sent after all."""
        if isinstance(rows, common_pb2.Tensor) and (attachment := self._attachment(sequence)):
            attachment.writer.release([rows.slice.generation])

    def abandon(self, sequence: Sequence) -> None:
        """The sequence was freed or re-aimed: what its slices hold may never be read, and is free a little later."""
        if attachment := self._attachment(sequence):
            attachment.writer.retire(sequence)

    def close(self, attachment: Attachment) -> None:
        """Unmaps a buffer whose draft went away."""
        attachment.segment.close()

    def close_all(self) -> None:
        """Unmaps all buffers at the end of the process, and takes away the names that are left."""
        for segment in [self._spare, *(attachment.segment for attachment in self._attachments.values())]:
            if segment is not None:
                segment.close()

    def _attachment(self, sequence: Sequence) -> Attachment | None:
        """The buffer that the sequence's rows go into, if there is one and its reader has opened it."""
        if sequence.aux.transport != common_pb2.TRANSPORT_SHARED_MEMORY:
            return None
        attachment = self._attachments.get(sequence.aux.draft_instance_id)
        return attachment if attachment is not None and attachment.opened else None
