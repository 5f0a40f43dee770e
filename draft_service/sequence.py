"""What the draft holds of one sequence, and how rows that arrive change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from draft_service.choice import ProposalSampling
from outrider.v1 import common_pb2

if TYPE_CHECKING:
    from draft_service.pair_link import PairLink


@dataclass(eq=False, slots=True)
class DraftSequence:
    """One sequence. It holds keys and values of the positions start..end-1.

    `owner` and `sequence_id` say whose it is; the engine only hands them back.
    """

    owner: Any
    sequence_id: int
    sampling: ProposalSampling
    request_id: str = ""
    # How the target calls it in pair-local rounds, 0 where it does not, and the link through which it asked last.
    link_id: int = 0
    link: PairLink | None = None
    start: int = 0
    end: int = 0
    closed: bool = False
    # Pages of the positions from first_page * page_size on, and the table that attention reads.
    first_page: int = 0
    pages: list[int] = field(default_factory=list)
    table: npt.NDArray[np.int32] | None = None
    last_used: float = 0.0
    # Seconds from its last answer to the rows that followed.
    turnaround: float = 0.0


@dataclass(eq=False, slots=True)
class Part:
    """Rows of a buffer [m, k * Ht] that holds those of many sequences: a step may take them all at once."""

    whole: torch.Tensor
    first: int
    count: int

    @property
    def nbytes(self) -> int:
        """Their size, as a tensor says it."""
        return self.count * self.whole.shape[1] * self.whole.itemsize

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Some of them as a tensor, or all with [:]."""
        start, stop, _ = rows.indices(self.count)
        return self.whole.narrow(0, self.first + start, stop - start)


States = torch.Tensor | Part


@dataclass(eq=False, slots=True)
class Extend:
    """Rows for a sequence: states [n, k * Ht] at first_position.., each with the token one position later.

    `on_read` is called, once, when the states were copied or are not wanted any more.
    """

    sequence: DraftSequence
    first_position: int
    states: States
    token_ids: list[int]
    num_draft_tokens: int
    min_confidence: float
    arrived: float
    on_read: Callable[[], None] | None = None
    # Where the target itself asks: the answer goes there.
    link: PairLink | None = None
    # How the states came.
    transport: common_pb2.Transport = common_pb2.TRANSPORT_INLINE

    @property
    def proposal_position(self) -> int:
        """Position of the first token that these rows let the draft propose."""
        return self.first_position + len(self.token_ids) + 1


@dataclass(eq=False, slots=True)
class NewRows:
    """Consecutive new rows of one sequence, from first_position on: states and tokens, in pieces as they came."""

    first_position: int
    pieces: list[tuple[States, list[int]]] = field(default_factory=list)
    count: int = 0

    def add(self, states: States, token_ids: list[int]) -> None:
        """Appends rows."""
        self.pieces.append((states, token_ids))
        self.count += len(token_ids)

    def cut(self, count: int) -> None:
        """Keeps the first `count` rows."""
        while self.count > count:
            states, token_ids = self.pieces.pop()
            self.count -= len(token_ids)
            if self.count < count:
                kept = count - self.count
                self.add(states[:kept], token_ids[:kept])


def take_rows(sequence: DraftSequence, extends: Sequence[Extend], limit: int) -> NewRows:
    """The rows to compute once all `extends` are taken in, in order; start and end of the sequence follow.

    Rows replace what was held from their position on. Beyond a gap, or before its start, the sequence begins anew
    with the rows. Positions from `limit` on are never held.
    """
    rows: NewRows | None = None
    for extend in extends:
        first = extend.first_position
        if sequence.start == sequence.end or not sequence.start <= first <= sequence.end:
            sequence.start = sequence.end = first
            rows = None
        if rows is None or not rows.count or first < rows.first_position:
            rows = NewRows(first)
        else:
            rows.cut(first - rows.first_position)
        kept = max(0, min(len(extend.token_ids), limit - first))
        if kept == len(extend.token_ids):
            rows.add(extend.states, extend.token_ids)
        elif kept:
            rows.add(extend.states[:kept], extend.token_ids[:kept])
        sequence.end = first + kept
    return rows or NewRows(0)
