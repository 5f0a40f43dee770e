"""One sequence's part in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from draft_service.sequence import DraftSequence, NewRows
from kernels.transfer import to_device

Pieces = list[tuple[torch.Tensor, npt.NDArray[np.int64]]]


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


def chain_rows_last(turns: Sequence[Turn]) -> Pieces:
    """States and tokens of all turns' rows in order, but the last rows of those that want a chain at the end."""
    if len(turns) == 1:
        return turns[0].rows.pieces
    others: Pieces = []
    last: Pieces = []
    for turn in turns:
        pieces = turn.rows.pieces
        if turn.num_tokens:
            states, tokens = pieces[-1]
            pieces = [*pieces[:-1], (states[:-1], tokens[:-1])]
            last.append((states[-1:], tokens[-1:]))
        others += pieces
    return others + last


def joined_states(pieces: Pieces, device: torch.device) -> torch.Tensor:
    """The states of all rows on `device`; some may have come through its memory, and some inline."""
    states = [states for states, _ in pieces]
    if len({one.device for one in states}) > 1:
        states = [to_device(one, device) for one in states]
    return to_device(states[0] if len(states) == 1 else torch.cat(states), device)


def places_of_rows(turns: Sequence[Turn]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of the rows that are taken in, and which turn each belongs to."""
    firsts = [turn.rows.first_position for turn in turns]
    counts = [turn.num_taken_in for turn in turns]
    positions = [np.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    return np.concatenate(positions), np.arange(len(turns)).repeat(counts)
