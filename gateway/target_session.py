"""The session with one target: a held Verify stream and the sequences that are open on it."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

from gateway.streams import HeldStream
from outrider.errors import REOPEN_REASONS, from_status, reason_of
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc

LOST = "LOST"  # the stream or the process is gone

AuxRequest = target_pb2.TargetCommand.AuxRequest
OpenSequence = target_pb2.TargetCommand.OpenSequence
GrantRounds = target_pb2.TargetCommand.GrantRounds


class SequenceLost(Exception):
    """The target no longer holds the sequence; `reason` is LOST or one of the contract's reopen reasons."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class TargetSequence:
    """One sequence on a target. Its events are taken in order by the one coroutine that runs the request."""

    def __init__(self, session: TargetSession, sequence_id: int) -> None:
        self.id = sequence_id
        self.session = session
        self.open = True
        self.event_time = 0.0  # when the event that was taken last arrived, by perf_counter
        self._events: deque[tuple[float, target_pb2.TargetEvent]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loss: SequenceLost | None = None

    def advance(self, chain: Sequence[int], aux: AuxRequest | None, grant: GrantRounds | None) -> None:
        """Has a chain verified, and lets the pair go on by itself from there; Advanced answers it."""
        if grant is not None:
            self.grant(grant)
        command = self.session.command(self.id).advance
        command.SetInParent()
        command.draft_token_ids.extend(chain)
        if aux is not None:
            command.aux.CopyFrom(aux)

    def grant(self, grant: GrantRounds) -> None:
        """Lets target and draft go on by themselves, as far as it says."""
        self.session.command(self.id).grant.CopyFrom(grant)

    async def next_event(self) -> target_pb2.TargetEvent:
        """The next Prefilled or Advanced. Raises SequenceLost, or the target's error where reopening would not help."""
        while not self._events:
            if self._loss is not None:
                raise self._loss
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.event_time, event = self._events.popleft()
        if event.HasField("error"):
            reason = reason_of(event.error)
            if reason in REOPEN_REASONS:
                raise SequenceLost(reason, event.error.message)
            raise from_status(event.error)
        return event

    def close(self) -> None:
        """Frees the sequence, wherever it stands; harmless once it has ended."""
        if self.open:
            self.open = False
            self.session.forget(self)
            if self.session.alive:
                self.session.command(self.id).close.SetInParent()

    def take(self, event: target_pb2.TargetEvent) -> None:
        """Called by the session with an event of this sequence."""
        ended = event.HasField("error") or (
            event.HasField("advanced") and event.advanced.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
        )
        if ended:
            self.open = False
            self.session.forget(self)
        self._events.append((perf_counter(), event))
        self._wake()

    def lose(self, reason: str) -> None:
        """Called by the session when its stream ended."""
        self.open = False
        self._loss = SequenceLost(LOST, reason)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TargetSession:
    """A held Verify stream. Ids are never used twice in it."""

    def __init__(
        self,
        stub: target_pb2_grpc.TargetServiceStub,
        on_stats: Callable[[target_pb2.StepStats], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._ids = itertools.count(1)
        self._on_stats = on_stats
        self._on_end = on_end
        self.sequences: dict[int, TargetSequence] = {}
        self._stream: HeldStream[target_pb2.VerifyRequest, target_pb2.VerifyResponse] = HeldStream(
            stub.Verify(), target_pb2.VerifyRequest, self._dispatch, self._end
        )

    @property
    def alive(self) -> bool:
        """Whether the stream still stands."""
        return self._stream.alive

    def open(self, command: OpenSequence) -> TargetSequence:
        """Opens a sequence. Prefilled events answer it, then Advanced with the first token."""
        sequence = TargetSequence(self, next(self._ids))
        if not self.alive:
            sequence.lose("the session has ended")
            return sequence
        self.sequences[sequence.id] = sequence
        self.command(sequence.id, command.ByteSize()).open.CopyFrom(command)
        return sequence

    def command(self, sequence_id: int, num_bytes: int = 0) -> target_pb2.TargetCommand:
        """A new command in the next message, with so much payload."""
        return self._stream.message(num_bytes).commands.add(sequence_id=sequence_id)

    def forget(self, sequence: TargetSequence) -> None:
        """No events are expected for it any more."""
        self.sequences.pop(sequence.id, None)

    def close(self) -> None:
        """Ends the stream, and with it every sequence."""
        self._stream.close()
        self._lose_all("the gateway closed the session")

    def _dispatch(self, response: target_pb2.VerifyResponse) -> None:
        for event in response.events:
            sequence = self.sequences.get(event.sequence_id)
            if sequence is not None:  # else it was closed while the event was on its way
                sequence.take(event)
        if response.HasField("stats"):
            self._on_stats(response.stats)

    def _end(self, reason: str) -> None:
        self._lose_all(reason)
        self._on_end(reason)

    def _lose_all(self, reason: str) -> None:
        sequences, self.sequences = self.sequences, {}
        for sequence in sequences.values():
            sequence.lose(reason)
