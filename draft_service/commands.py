"""What is asked of the draft's engine, and what it answers: plain data, checked before it gets there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from draft_service.metrics import DraftMetrics
from draft_service.proposer import Chain, Proposer
from draft_service.sequence import DraftSequence, Extend
from outrider.v1 import draft_pb2

if TYPE_CHECKING:
    from draft_service.pair_link import PairLink


@dataclass(frozen=True, slots=True)
class Open:
    """A sequence begins."""

    sequence: DraftSequence


@dataclass(frozen=True, slots=True)
class Close:
    """A sequence ends."""

    sequence: DraftSequence


@dataclass(slots=True)
class Ask:
    """An ExtendDraft from the target itself, which names the sequence by its link_id. Not checked yet."""

    link: PairLink
    message: draft_pb2.DraftCommand


@dataclass(frozen=True, slots=True)
class Replace:
    """New weights; all sequences have ended."""

    proposer: Proposer
    metrics: DraftMetrics


@dataclass(frozen=True, slots=True)
class Barrier:
    """Calls `passed`, in the engine's thread, once all that came before it is done, on the device too."""

    passed: Callable[[], None]


Command: TypeAlias = Open | Extend | Close | Ask | Replace | Barrier


@dataclass(slots=True)
class Answer:
    """A chain for a sequence, or the error that ended it; `link` where the target itself asked."""

    sequence: DraftSequence
    chain: Chain
    first_position: int
    queue_us: int = 0
    compute_us: int = 0
    error: Exception | None = None
    link: PairLink | None = None

    def begin(self, event: draft_pb2.DraftEvent, sequence_id: int) -> None:
        """Makes an empty event that of a chain, for whoever calls the sequence so, but for what the step gives.

        Field by field, since a message that is given to another is copied.
        """
        event.sequence_id, event.queue_us = sequence_id, self.queue_us
        event.proposal.first_position = self.first_position

    def finish(self, event: draft_pb2.DraftEvent) -> None:
        """Adds what the step gave."""
        event.compute_us = self.compute_us
        proposal = event.proposal
        proposal.token_ids.extend(self.chain.token_ids)
        proposal.probabilities.extend(self.chain.probabilities)
