"""What the draft holds of one sequence, and how rows that arrive change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draft_service.choice import ProposalSampling


@dataclass(eq=False, slots=True)
class DraftSequence:
    """One sequence. It holds keys and values of the positions start..end-1.

    `owner` and `sequence_id` say whose it is; the engine only hands them back.
    """

    owner: Any
    sequence_id: int
    sampling: ProposalSampling
    request_id: str = ""
    start: int = 0
    end: int = 0
    closed: bool = False
    # Pages of the positions from first_page * page_size on, and the table that attention reads.
    first_page: int = 0
    pages: list[int] = field(default_factory=list)
    table: torch.Tensor | None = None
    last_used: float = 0.0
    # Seconds from its last answer to the rows that followed.
    turnaround: float = 0.0


@dataclass(eq=False, slots=True)
class Extend:
    """Rows for a sequence: states [n, k * Ht] at first_position.., each with the token one position later.

    `on_read` is called, once, when the states were copied or are not wanted any more.
    """

    sequence: DraftSequence
    first_position: int
    states: torch.Tensor
    token_ids: torch.Tensor
    num_draft_tokens: int
    min_confidence: float
    arrived: float
    on_read: Callable[[], None] | None = None

    @property
    def proposal_position(self) -> int:
        """Position of the first token that these rows let the draft propose."""
        return self.first_position + len(self.token_ids) + 1


@dataclass(eq=False, slots=True)
class NewRows:
    """Consecutive new rows of one sequence, from first_position on."""

    first_position: int
    states: list[torch.Tensor]
    token_ids: list[torch.Tensor]

    @property
    def count(self) -> int:
        """How many rows."""
        return sum(map(len, self.token_ids))

    def cut(self, count: int) -> None:
        """Keeps the first `count` rows."""
        for index, piece in enumerate(self.token_ids):
            if count < len(piece):
                self.states[index], self.token_ids[index] = self.states[index][:count], piece[:count]
            count = max(0, count - len(piece))
        while self.token_ids and not len(self.token_ids[-1]):
            self.token_ids.pop()
            self.states.pop()


def take_rows(sequence: DraftSequence, extends: Sequence[Extend], limit: int) -> NewRows:
    """The rows to compute once all `extends` are taken in, in order; start and end of the sequence follow.

    Rows replace what was held from their position on. Beyond a gap, or before its start, the sequence begins anew
    with the rows. Positions from `limit` on are never held.
    """
    rows = NewRows(0, [], [])
    for extend in extends:
        first = extend.first_position
        if sequence.start == sequence.end or not sequence.start <= first <= sequence.end:
            sequence.start = sequence.end = first
            rows = NewRows(first, [], [])
        if not rows.count or first < rows.first_position:
            rows = NewRows(first, [], [])
        else:
            rows.cut(first - rows.first_position)
        kept = max(0, min(len(extend.token_ids), limit - first))
        if kept:
            rows.states.append(extend.states[:kept])
            rows.token_ids.append(extend.token_ids[:kept])
        sequence.end = first + kept
    return rows
