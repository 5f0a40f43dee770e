"""The hidden states of all commands of a packet at once: the target writes them one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draft_service.validation import CommandRules
from outrider.errors import InvalidArgument
from outrider.shared_slices import tensor_at
from outrider.tensors import DTYPES
from outrider.v1 import draft_pb2


def joint_states(commands: Sequence[draft_pb2.DraftCommand], rules: CommandRules) -> Sequence[torch.Tensor] | None:
    """The rows of each command, [n, k * Ht], as parts of one view of the buffer: a tenth of what a view of each costs.

    None where they do not follow each other in one buffer in one type and width, with whole rows between them, or
    where anything else is unusual: each command is then to be read, and refused, by itself.
    """
    if len(commands) < 2:
        return None
    slices, counts, offsets = [], [], []
    first = commands[0].extend.hidden_states.tensor
    number, buffer_id = first.dtype, first.slice.buffer_id
    dtype = DTYPES.get(number)
    if dtype is None or not dtype.is_floating_point:
        return None
    for command in commands:
        tensor = command.extend.hidden_states.tensor
        slice_, shape = tensor.slice, tensor.shape
        if slice_.buffer_id != buffer_id or tensor.dtype != number or len(shape) != 2 or shape[1] != rules.input_width:
            return None
        slices.append(slice_)
        counts.append(shape[0])
        offsets.append(slice_.offset)
    row_bytes = rules.input_width * dtype.itemsize
    sizes = _sizes([offset - offsets[0] for offset in offsets], counts, row_bytes)
    if sizes is None or min(counts) < 1:
        return None
    try:
        memory = rules.slices.resolve_run(slices, sum(sizes) * row_bytes)
    except InvalidArgument:
        return None
    return tensor_at(memory, 0, dtype, (sum(sizes), rules.input_width)).split(sizes)[::2]


def _sizes(starts: list[int], counts: list[int], row_bytes: int) -> list[int] | None:
    """Rows of each command, and behind it those that belong to none; None where they are no such run."""
    sizes: list[int] = []
    end = 0
    for start, count in zip(starts, counts, strict=True):
        between, rest = divmod(start - end, row_bytes)
        if rest or between < 0:
            return None
        if sizes:
            sizes.append(between)
        sizes.append(count)
        end = start + count * row_bytes
    return sizes
