"""All commands of a packet read at once: the target writes their hidden states one behind the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from draft_service.sequence import DraftSequence, Extend, Part
from draft_service.validation import LARGEST_POSITION, CommandRules, SliceReader
from outrider.errors import InvalidArgument
from outrider.shared_slices import tensor_at
from outrider.tensors import DTYPES
from outrider.v1 import common_pb2, draft_pb2

if TYPE_CHECKING:
    from draft_service.pair_link import PairLink


class AskedRows(NamedTuple):
    """What a command says, checked: states [n, k * Ht] in the buffer, with the tokens that follow, int64 [n]."""

    first_position: int
    states: Part
    token_ids: npt.NDArray[np.int64]
    num_draft_tokens: int
    min_confidence: float
    slice: common_pb2.BufferSlice

    def extend(self, sequence: DraftSequence, slices: SliceReader, link: PairLink | None = None) -> Extend:
        """The command for the engine, now."""
        on_read = partial(slices.release, self.slice)
        return Extend(sequence, *self[:-1], time.perf_counter(), on_read, link, slices.transport)


def read_together(commands: Sequence[draft_pb2.DraftCommand], rules: CommandRules) -> list[AskedRows] | None:
    """The rows of each command, as parts of one view of the buffer.

    None where they do not follow each other in one buffer in one type and width, with whole rows between them, or
    where anything else is unusual: each command is then to be read, and refused, by itself.
    """
    if len(commands) < 2:
        return None
    extends = [command.extend for command in commands]
    states = [extend.hidden_states for extend in extends]
    tensors = [one.tensor for one in states]
    slices = [tensor.slice for tensor in tensors]
    shapes = [tensor.shape[:] for tensor in tensors]
    number, buffer_id = tensors[0].dtype, slices[0].buffer_id
    dtype = DTYPES.get(number)
    if dtype is None or not dtype.is_floating_point:
        return None
    if (
        {slice_.buffer_id for slice_ in slices} != {buffer_id}
        or {tensor.dtype for tensor in tensors} != {number}
        or {len(shape) for shape in shapes} != {2}
        or {width for _, width in shapes} != {rules.input_width}
    ):
        return None
    row_bytes = rules.input_width * dtype.itemsize
    counts = [shape[0] for shape in shapes]
    starts = _starts([slice_.offset for slice_ in slices], counts, row_bytes)
    if starts is None or min(counts) < 1:
        return None
    firsts = [one.first_position for one in states]
    confidences = [extend.min_confidence for extend in extends]
    token_ids = [extend.token_ids[:] for extend in extends]
    ids = np.array(list(itertools.chain.from_iterable(token_ids)), dtype=np.int64)
    if (
        list(map(len, token_ids)) != counts
        or ids.max() >= rules.vocab_size
        or max(firsts) + max(counts) >= LARGEST_POSITION
        or not all(0 <= confidence <= 1 for confidence in set(confidences))
    ):
        return None
    num_rows = starts[-1] + counts[-1]
    try:
        memory = rules.slices.resolve_run(slices, num_rows * row_bytes)
    except InvalidArgument:
        return None
    whole = tensor_at(memory, 0, dtype, (num_rows, rules.input_width))
    parts = [Part(whole, start, count) for start, count in zip(starts, counts, strict=True)]
    tokens = [ids[end - count : end] for count, end in zip(counts, itertools.accumulate(counts), strict=True)]
    wanted = [extend.num_draft_tokens for extend in extends]
    return list(map(AskedRows, firsts, parts, tokens, wanted, confidences, slices))


def _starts(offsets: list[int], counts: list[int], row_bytes: int) -> list[int] | None:
    """Which row each command's are from, counted from the first's; None where they are no such run."""
    starts: list[int] = []
    end = 0
    for offset, count in zip(offsets, counts, strict=True):
        start, rest = divmod(offset - offsets[0], row_bytes)
        if rest or start < end:
            return None
        starts.append(start)
        end = start + count
    return starts
