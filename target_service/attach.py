"""Buffers through which co-located drafts read hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.v1 import common_pb2
from target_service.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Slice:
    """Room in a buffer: its bytes, uint8 [size], and how a message names it."""

    memory: torch.Tensor
    reference: common_pb2.BufferSlice


class Buffers:
    """The buffers of all attached drafts."""

    num_unreleased = 0

    def take(self, sequence: Sequence, size: int) -> Slice | None:
        """Room for `size` bytes in a buffer that the sequence's reader has open; None where there is none."""
        return None

    def abandon(self, sequence: Sequence) -> None:
        """The sequence was freed or re-aimed: what its slices held may never be read, and is soon free again."""
