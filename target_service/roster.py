"""Who is here: the sequences of all sessions, and what commands do to them between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable

from outrider.errors import (
    DRAINING,
    PREEMPTED,
    QUEUE_FULL,
    Internal,
    InvalidArgument,
    NotFound,
    OutriderError,
    ResourceExhausted,
    Unavailable,
)
from target_service.attach import Buffers
from target_service.commands import (
    Advance,
    Close,
    Command,
    Detached,
    Drain,
    EndSession,
    Event,
    Expel,
    Failed,
    Grant,
    Linked,
    Open,
    Proposed,
    Reject,
    RowsWritten,
    Session,
    Stats,
    Unlinked,
)
from target_service.metrics import TargetMetrics
from target_service.pair_rounds import PairRounds
from target_service.scheduler import Scheduler
from target_service.sequence import Key, Sequence

log = logging.getLogger(__name__)


class Roster:
    """All sequences by session and id, and the events that wait to go to their sessions."""

    def __init__(
        self,
        scheduler: Scheduler,
        buffers: Buffers,
        pairs: PairRounds,
        metrics: TargetMetrics,
        deliver: Callable[..., None],
    ) -> None:
        self.sequences: dict[Key, Sequence] = {}
        self.draining = False
        self._scheduler = scheduler
        self._buffers = buffers
        self._pairs = pairs
        self._metrics = metrics
        self._deliver = deliver
        self._opened = 0
        self._outgoing: dict[Session, list[Event]] = {}

    def apply(self, command: Command) -> None:
        """Does what a command says. What is wrong with it ends its sequence alone."""
        match command:
            case Advance():
                self._advance(command)
            case Proposed():
                self._pairs.take(command)
            case Grant():
                if sequence := self._find(command):
                    sequence.grant = command
            case Open():
                self._open(command)
            case Close():
                if sequence := self._find(command):
                    self.release(sequence)
            case RowsWritten():
                if sequence := self._find(command):
                    sequence.unwritten_chunks -= 1
            case Reject():
                self._reject(command)
            case EndSession():
                for sequence in [s for s in self.sequences.values() if s.open.session is command.session]:
                    self.release(sequence)
                self._outgoing.pop(command.session, None)
            case Detached():
                self._buffers.close(command.attachment)
            case Linked():
                self._pairs.link(command.link)
            case Unlinked():
                self._pairs.unlink(command.link)
            case Drain():
                self.draining = True
                for sequence in list(self._scheduler.waiting):
                    self.fail(sequence, _draining())
            case Expel():
                for sequence in list(self.sequences.values()):
                    self.fail(sequence, _draining())

    def put(self, sequence: Sequence, event: Event) -> None:
        """Keeps an event for the sequence's session until `flush`."""
        self._outgoing.setdefault(sequence.open.session, []).append(event)

    def fail(self, sequence: Sequence, error: OutriderError) -> None:
        """Ends a sequence with an error."""
        if isinstance(error, Internal):
            log.error("%s ended: %s", sequence, error)
        self.release(sequence)
        self._answer(*sequence.key, error)

    def lose(self, sequence: Sequence) -> None:
        """Ends a sequence whose pages the scheduler has taken."""
        log.info("%s preempted", sequence)
        self._forget(sequence)
        self._answer(*sequence.key, _preempted())

    def release(self, sequence: Sequence) -> None:
        """Frees a sequence: its id, place, pages and slices."""
        self._scheduler.release(sequence)
        self._forget(sequence)

    def flush(self, stats: Stats) -> None:
        """Sends what waits, in one delivery a session."""
        for session, events in self._outgoing.items():
            self._deliver(session.take, events, stats)
        self._outgoing.clear()

    def _open(self, command: Open) -> None:
        if (command.session, command.sequence_id) in self.sequences:
            self._reject(Reject(command.session, command.sequence_id, _used_twice()))
            return
        if self.draining:
            self._answer(command.session, command.sequence_id, _draining())
            return
        self._opened += 1
        sequence = Sequence.of(command, self._opened)
        self.sequences[sequence.key] = sequence
        if (refused := self._scheduler.enqueue(sequence)) is not None:
            self._forget(refused)
            self._answer(*refused.key, _queue_full(self._scheduler))

    def _advance(self, command: Advance) -> None:
        sequence = self._find(command)
        if sequence is None:
            self._answer(command.session, command.sequence_id, _unknown(command.sequence_id))
        elif sequence.idle_since is None or sequence.wait is not None:
            self.fail(sequence, _early(sequence))
        else:
            sequence.turnaround = command.received - sequence.idle_since
            sequence.advance, sequence.idle_since = command, None

    def _reject(self, command: Reject) -> None:
        if sequence := self._find(command):
            self.fail(sequence, command.error)
        else:
            self._answer(command.session, command.sequence_id, command.error)

    def _answer(self, session: Session, sequence_id: int, error: OutriderError) -> None:
        self._metrics.failed(error.reason)
        self._outgoing.setdefault(session, []).append(Failed(sequence_id, error))

    def _find(self, command: Advance | Grant | Close | RowsWritten | Reject) -> Sequence | None:
        return self.sequences.get((command.session, command.sequence_id))

    def _forget(self, sequence: Sequence) -> None:
        del self.sequences[sequence.key]
        self._pairs.forget(sequence)
        self._buffers.abandon(sequence)


def _preempted() -> ResourceExhausted:
    return ResourceExhausted("its pages were needed, or it had no command for too long", PREEMPTED, retry_after=0)


def _draining() -> Unavailable:
    return Unavailable("this target is shutting down", DRAINING)


def _queue_full(scheduler: Scheduler) -> ResourceExhausted:
    return ResourceExhausted(
        f"{len(scheduler.waiting)} sequences are waiting, which is all the queue takes", QUEUE_FULL
    )


def _unknown(sequence_id: int) -> NotFound:
    return NotFound(f"advance: sequence {sequence_id} is not open in this session")


def _used_twice() -> InvalidArgument:
    return InvalidArgument("sequence_id", "this sequence is open already; a second open frees both")


def _early(sequence: Sequence) -> InvalidArgument:
    owed = "the last advance" if sequence.computed >= sequence.num_prompt else "the open"
    return InvalidArgument("advance", f"expected no command before {owed} is answered")
