"""The session with one draft: a held Propose stream and the sequences that are open on it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.streams import HeldStream

if TYPE_CHECKING:
    from gateway.metrics import SpeculationMetrics
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2

log = logging.getLogger(__name__)

UNANSWERED_SECONDS = 1.0  # a sequence unanswered for so long is closed
MIN_TIMEOUT, MAX_TIMEOUT, TIMEOUT_MEANS = 0.02, 1.0, 10
_SWEEP_SECONDS = 0.1
_MEAN_WEIGHT = 0.1

PairRound = target_pb2.TargetEvent.PairRound
OnDiscard = Callable[[str, int], None]


@dataclass(slots=True)
class Chain:
    """What the draft answered in time, and where the time went, in seconds."""

    token_ids: Sequence[int] = ()
    queue: float = 0.0
    compute: float = 0.0
    waited: float = 0.0  # from the Extend to its answer
    metrics: SpeculationMetrics | None = None  # of the draft that proposed it


class DraftSequence:
    """One sequence on a draft."""

    def __init__(self, session: DraftSession, sequence_id: int) -> None:
        self.id = sequence_id
        self.session = session
        self.open = True
        self.failed = False  # the draft itself refused it
        self.link_id = 0  # how the target calls it in pair-local rounds
        self.next_row = 0  # the first position whose row it was not given
        self._unanswered: deque[tuple[float, int]] = deque()  # when an Extend went out, and the position it asks for
        self._expected = -1  # position of the proposal that is still of use
        self._chain: Chain | None = None
        self._waiter: asyncio.Future[None] | None = None

    def extend(self, rows: common_pb2.HiddenStates, token_ids: Sequence[int], num_draft_tokens: int) -> None:
        """Passes the target's rows on, as they are, with their tokens, and asks for a chain unless 0."""
        num_bytes = len(rows.tensor.data)
        extend = self.session.command(self.id, num_bytes).extend
        extend.hidden_states.CopyFrom(rows)
        extend.token_ids.extend(token_ids)
        extend.num_draft_tokens = num_draft_tokens
        self.next_row = rows.first_position + len(token_ids)
        self.drop_chain("stale")
        if num_draft_tokens:
            self._expected = self.next_row + 1
            self._unanswered.append((self.session.now(), self._expected))

    async def chain(self, position: int) -> Chain | None:
        """The chain that begins at `position`; None when it was not asked for, or does not come in time.

        While an earlier Extend is still unanswered there is no waiting: a draft that stands still costs one time-out.
        """
        if self._chain is None and self.open and self._expected == position and len(self._unanswered) == 1:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            asked = self._unanswered[-1][0]
            timer = loop.call_at(asked + self.session.timeout, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        chain, self._chain = self._chain, None
        self._expected = -1
        return chain

    def took_pair_round(self, pair_round: PairRound) -> None:
        """The target passed rows on itself, and got a chain for them, or none."""
        self.session.on_discard("late", pair_round.num_late)
        self.session.on_discard("cut", pair_round.num_cut)
        if pair_round.draft_token_ids:
            self.session.answered(pair_round.waited_us * 1e-6)

    def drop_chain(self, reason: str) -> None:
        """Forgets a chain that will not be verified."""
        if self._chain is not None:
            self.session.on_discard(reason, len(self._chain.token_ids))
            self._chain = None

    def close(self) -> None:
        """Frees the sequence; harmless once it has ended."""
        if self.open:
            self.lose()
            self.session.sequences.pop(self.id, None)
            if self.session.alive:
                self.session.command(self.id).close.SetInParent()

    def lose(self) -> None:
        """The draft no longer holds it."""
        self.open = False
        self.drop_chain("lost")
        self._wake()

    def unanswered_since(self) -> float | None:
        """When the oldest Extend without an answer went out."""
        return self._unanswered[0][0] if self._unanswered else None

    def take(self, event: draft_pb2.DraftEvent) -> None:
        """Called by the session with an event of this sequence."""
        if event.HasField("error"):
            log.warning("draft sequence %d failed: %s", self.id, event.error.message)
            self.failed = True
            self.session.sequences.pop(self.id, None)
            self.lose()
            return
        if not self._unanswered:
            self.session.on_discard("stale", len(event.proposal.token_ids))
            return
        asked, position = self._unanswered.popleft()
        proposal = event.proposal
        waited = self.session.now() - asked
        if proposal.token_ids:
            self.session.answered(waited)
        if position != self._expected:
            self.session.on_discard("late", len(proposal.token_ids))
        elif proposal.first_position != position:
            self.session.on_discard("stale", len(proposal.token_ids))
            self._wake()
        else:
            self._chain = Chain(proposal.token_ids, event.queue_us * 1e-6, event.compute_us * 1e-6, waited)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class DraftSession:
    """A held Propose stream. Ids are never used twice in it.

    `on_discard` is told of proposed tokens that come to nothing, with the reason.
    """

    def __init__(
        self,
        stub: draft_pb2_grpc.DraftServiceStub,
        fixed_timeout: float | None,
        on_discard: OnDiscard,
        on_unanswered: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._ids = itertools.count(1)
        self._fixed_timeout = fixed_timeout
        self._mean: float | None = None
        self.on_discard = on_discard
        self._on_unanswered = on_unanswered
        self._on_end = on_end
        self.num_answers = 0
        self.sequences: dict[int, DraftSequence] = {}
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self._stream: HeldStream[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse] = HeldStream(
            stub.Propose(), draft_pb2.ProposeRequest, self._dispatch, self._end
        )
        self._swept = self.now()
        self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    @property
    def alive(self) -> bool:
        """Whether the stream still stands."""
        return self._stream.alive

    @property
    def timeout(self) -> float:
        """Seconds after which a proposal is late: as configured, or ten times the mean between 20 ms and 1 s."""
        if self._fixed_timeout is not None:
            return self._fixed_timeout
        if self._mean is None:
            return MAX_TIMEOUT
        return min(max(TIMEOUT_MEANS * self._mean, MIN_TIMEOUT), MAX_TIMEOUT)

    def open(self, command: draft_pb2.DraftCommand.OpenDraft) -> DraftSequence:
        """Starts a sequence."""
        sequence = DraftSequence(self, next(self._ids))
        sequence.link_id = command.link_id
        self.sequences[sequence.id] = sequence
        self.command(sequence.id).open.CopyFrom(command)
        return sequence

    def command(self, sequence_id: int, num_bytes: int = 0) -> draft_pb2.DraftCommand:
        """A new command in the next message."""
        return self._stream.message(num_bytes).commands.add(sequence_id=sequence_id)

    def answered(self, seconds: float) -> None:
        """Takes the time of one answer into the mean; a single stall does not set the time-out to its longest."""
        seconds = min(seconds, self.timeout)
        self.num_answers += 1
        self._mean = seconds if self._mean is None else self._mean + _MEAN_WEIGHT * (seconds - self._mean)

    def close(self) -> None:
        """Ends the stream, and with it every sequence."""
        self._sweeper.cancel()
        self._stream.close()
        self._lose_all()

    def _dispatch(self, response: draft_pb2.ProposeResponse) -> None:
        for event in response.events:
            sequence = self.sequences.get(event.sequence_id)
            if sequence is not None:
                sequence.take(event)
            else:  # closed while the event was on its way
                self.on_discard("lost", len(event.proposal.token_ids))

    def _sweep(self) -> None:
        """Closes what has been unanswered for too long; the draft is used again once its health check answers."""
        self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        last, self._swept = self._swept, self.now()
        if self._swept - last > UNANSWERED_SECONDS:
            return  # the gateway itself stood still: what was answered meanwhile is yet to be read
        overdue = self._swept - UNANSWERED_SECONDS
        writing = self._stream.writing_since
        blocked = writing is not None and writing < overdue
        stalled = [s for s in self.sequences.values() if blocked or (s.unanswered_since() or overdue) < overdue]
        for sequence in stalled:
            sequence.close()
        if stalled:
            self._on_unanswered()

    def _end(self, reason: str) -> None:
        self._sweeper.cancel()
        self._lose_all()
        self._on_end(reason)

    def _lose_all(self) -> None:
        sequences, self.sequences = self.sequences, {}
        for sequence in sequences.values():
            sequence.lose()
