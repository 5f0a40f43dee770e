"""One Verify stream: what goes to the engine, and in which order its events leave.

Whatever is ready goes into one message, up to 4 MiB, except what a prompt has much of: rows that travel inline, and
log-probabilities. Those go in pieces of at most 512 KiB, one a message, behind the other sequences' events, and the
engine computes at most two chunks ahead of such rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from outrider.channels import FULL_MESSAGE_BYTES
from outrider.v1 import target_pb2
from target_service.commands import Close, EndSession, Event, Failed, Prefilled, Rows, RowsWritten, Stats
from target_service.logprobs import TokenLogprobs
from target_service.validation import CommandReader

# Inline rows of a prompt in one message, and its log-probabilities.
PIECE_BYTES = 512 << 10
# About what they take: a token with its log-probability, and the rest of an event.
_LOGPROB_BYTES = 12
_EVENT_BYTES = 64


class VerifySession:
    """Owns the sequences opened on one stream. All methods run on the event loop."""

    def __init__(self, reader: CommandReader, submit: Callable[..., None]) -> None:
        self._reader = reader
        self._submit = submit
        self._outbox = SessionOutbox()

    def dispatch(self, request: target_pb2.VerifyRequest) -> None:
        """Hands the commands of a message to the engine, in order and together, so that they share a step."""
        commands = [self._reader.read(self, command) for command in request.commands]
        for command in commands:
            if isinstance(command, Close):
                self._outbox.drop(command.sequence_id)
        self._submit(*commands)

    def take(self, events: list[Event], stats: Stats) -> None:
        """Events from the engine."""
        self._outbox.put(events, stats)

    async def next_batch(self) -> tuple[list[Event], Stats]:
        """What the next message carries. Being asked for it means that the one before was written."""
        if (sequence_id := self._outbox.written()) is not None:
            self._submit(RowsWritten(self, sequence_id))
        return await self._outbox.next_events()

    @property
    def idle(self) -> bool:
        """Whether every event has been taken by the writer."""
        return self._outbox.empty

    def end(self) -> None:
        """The stream is over, and with it everything opened on it."""
        self._submit(EndSession(self))


class SessionOutbox:
    """Events in order within a sequence; small ones pass other sequences' pieces of prompts."""

    def __init__(self) -> None:
        self._small: deque[Event] = deque()
        # Per sequence, what must not pass its prompt's pieces: those, and all that came after.
        self._held: dict[int, deque[_Held]] = {}
        # The sequence whose chunk ended in the message that was taken last.
        self._leaving: int | None = None
        self._stats = Stats()
        self._ready = asyncio.Event()

    def put(self, events: list[Event], stats: Stats) -> None:
        """Appends events that the engine has emitted."""
        self._stats = stats
        for event in events:
            if event.sequence_id in self._held or _is_long(event):
                self._held.setdefault(event.sequence_id, deque()).extend(_pieces(event))
            else:
                self._small.append(event)
        self._ready.set()

    def drop(self, sequence_id: int) -> None:
        """Forgets what is held back of a sequence that the peer has closed."""
        self._held.pop(sequence_id, None)

    def written(self) -> int | None:
        """The sequence of the prompt chunk that ended in the last message, which has now been written."""
        leaving, self._leaving = self._leaving, None
        return leaving

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._small and not self._held

    async def next_events(self) -> tuple[list[Event], Stats]:
        """All small events that wait, or a message full, then at most one piece of a prompt; waits for any."""
        while self.empty:
            self._ready.clear()
            await self._ready.wait()
        events: list[Event] = []
        room = FULL_MESSAGE_BYTES
        while self._small and room > 0:
            events.append(self._small.popleft())
            room -= _num_bytes(events[-1])
        if self._held and not self._small:  # else it might pass what comes before it
            events += self._next_held()
        return events, self._stats

    def _next_held(self) -> list[Event]:
        """The oldest sequence's next piece, and the small events right behind it."""
        sequence_id, held = next(iter(self._held.items()))
        first = held.popleft()
        events, room = [first.event], FULL_MESSAGE_BYTES
        if first.ends_rows:
            self._leaving = sequence_id
        while held and not held[0].is_piece and room > 0:
            events.append(held.popleft().event)
            room -= _num_bytes(events[-1])
        if not held:
            del self._held[sequence_id]
        return events


@dataclass(frozen=True, slots=True)
class _Held:
    """An event that waits. `is_piece`: a part of a prompt's chunk. `ends_rows`: the last of one with inline rows."""

    event: Event
    is_piece: bool = False
    ends_rows: bool = False


def _is_long(event: Event) -> bool:
    return isinstance(event, Prefilled) and (_inline(event.rows) or _num_bytes(event) > PIECE_BYTES)


def _inline(rows: Rows | None) -> bool:
    return rows is not None and rows.inline


def _num_bytes(event: Event) -> int:
    """About as much as the event takes in a message."""
    if isinstance(event, Failed):
        return _EVENT_BYTES
    entries = event.prompt_logprobs if isinstance(event, Prefilled) else event.logprobs
    rows = event.rows
    return (
        _EVENT_BYTES
        + sum([_LOGPROB_BYTES * (1 + len(entry.top)) for entry in entries])
        + (rows.num_bytes if rows is not None and rows.inline else 0)
    )


def _pieces(event: Event) -> Iterator[_Held]:
    """The event itself, or a long one's rows and log-probabilities in pieces."""
    if not isinstance(event, Prefilled) or not _is_long(event):
        yield _Held(event)
        return
    parts = list(zip_longest(_row_pieces(event.rows), _logprob_pieces(event.prompt_logprobs)))
    position = event.first_logprob_position
    for place, (rows, entries) in enumerate(parts, start=1):
        piece = replace(event, rows=rows, prompt_logprobs=entries or [], first_logprob_position=position)
        yield _Held(piece, is_piece=True, ends_rows=_inline(event.rows) and place == len(parts))
        position += len(entries or ())


def _row_pieces(rows: Rows | None) -> Iterator[Rows | None]:
    if rows is None or not isinstance(rows.tensor, torch.Tensor):
        yield rows
        return
    row_bytes = rows.tensor.shape[1] * rows.tensor.element_size()
    position = rows.first_position
    for part in rows.tensor.split(max(PIECE_BYTES // row_bytes, 1)):
        yield Rows(position, part)
        position += len(part)


def _logprob_pieces(entries: list[TokenLogprobs]) -> Iterator[list[TokenLogprobs]]:
    if entries:
        count = max(PIECE_BYTES // (_LOGPROB_BYTES * (1 + len(entries[0].top))), 1)
        yield from (entries[first : first + count] for first in range(0, len(entries), count))
