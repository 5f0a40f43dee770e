"""One sequence's part in a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from draft_service.sequence import DraftSequence, NewRows, Part
from kernels.transfer import to_device


@dataclass(eq=False, slots=True)
class Turn:
    """One sequence's part in a step: its new rows, and the longest chain wanted (0: none).

    The sequence holds pages for its rows and, beyond them, for num_tokens - 1 steps of the chain.
    """

    sequence: DraftSequence
    rows: NewRows
    num_tokens: int
    min_confidence: float = 0.0

    @property
    def num_taken_in(self) -> int:
        """Rows of which only keys and values are wanted: all but that which a chain begins with."""
        return self.rows.count - (self.num_tokens > 0)


class RowOrder(NamedTuple):
    """The rows of all turns in the order in which they are computed: those that chains begin with at the end.

    order: int64 [T], of each its place among the turns' rows, one after the other. token_ids: int64 [T]. positions and
    turns: int64, of the rows before those at the end, and which turn each belongs to.
    """

    order: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int64]


def rows_in_order(turns: Sequence[Turn]) -> RowOrder:
    """Where the turns' rows stand, and their tokens."""
    pieces = [token_ids for turn in turns for _, token_ids in turn.rows.pieces]
    token_ids = np.array(list(itertools.chain.from_iterable(pieces)), dtype=np.int64)
    if len(turns) == 1:
        first, count = turns[0].rows.first_position, turns[0].num_taken_in
        return RowOrder(
            np.arange(len(token_ids)), token_ids, np.arange(first, first + count), np.zeros(count, dtype=np.int64)
        )
    counts = np.array([turn.rows.count for turn in turns])
    ends = counts.cumsum()
    lasts = (ends - 1)[[turn.num_tokens > 0 for turn in turns]]
    at_the_end = np.zeros(len(token_ids), dtype=bool)
    at_the_end[lasts] = True
    taken_in = np.flatnonzero(~at_the_end)
    order = np.concatenate([taken_in, lasts])
    of_turn = np.arange(len(turns)).repeat(counts)[taken_in]
    firsts = np.array([turn.rows.first_position for turn in turns]) - ends + counts
    return RowOrder(order, token_ids[order], firsts[of_turn] + taken_in, of_turn)


def in_one_part(turns: Sequence[Turn]) -> tuple[torch.Tensor, npt.NDArray[np.int64]] | None:
    """States that hold the rows of all turns, and for each row, one turn after the other, which of them it is.

    int64 [T]; None where the rows do not lie in one buffer.
    """
    parts = [states for turn in turns for states, _ in turn.rows.pieces if isinstance(states, Part)]
    if not parts or sum([len(turn.rows.pieces) for turn in turns]) != len(parts):
        return None
    whole = parts[0].whole
    if any(part.whole is not whole for part in parts):
        return None
    if len(parts) == 1:
        return parts[0][:], np.arange(parts[0].count)
    firsts = [part.first for part in parts]
    first, counts = min(firsts), np.array([part.count for part in parts])
    shifts = np.array(firsts) - first - counts.cumsum() + counts
    places = shifts.repeat(counts) + np.arange(counts.sum())
    return whole.narrow(0, first, int(places.max()) + 1), places


def joined_states(turns: Sequence[Turn], device: torch.device, room: torch.Tensor | None = None) -> torch.Tensor:
    """The states of all rows on `device`, in `room` if given; some may have come through its memory, some inline."""
    states = [states[:] for turn in turns for states, _ in turn.rows.pieces]
    if len(states) > 1 and len({one.device for one in states}) > 1:
        states = [to_device(one, device) for one in states]
    if room is None or states[0].device != device:
        joined = to_device(states[0] if len(states) == 1 else torch.cat(states), device)
        return joined if room is None else room.copy_(joined)
    return room.copy_(states[0]) if len(states) == 1 else torch.cat(states, out=room)
