"""One Verify stream: what goes to the engine, and in which order its events leave.

Whatever is ready goes into one message, except prompt rows that travel inline: those go in pieces of at most 512 KiB,
one a message, behind the other sequences' events, and the engine computes at most two chunks ahead of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from outrider.v1 import target_pb2
from target_service.commands import Close, EndSession, Event, Prefilled, Rows, RowsWritten, Stats
from target_service.validation import CommandReader

# Inline prompt rows of one message.
PIECE_BYTES = 512 << 10


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
    """Events in order within a sequence; small ones pass other sequences' prompt rows."""

    def __init__(self) -> None:
        self._small: deque[Event] = deque()
        # Per sequence, what must not pass its prompt rows: those, in pieces, and all that came after.
        self._held: dict[int, deque[_Held]] = {}
        # The sequence whose chunk ended in the message that was taken last.
        self._leaving: int | None = None
        self._stats = Stats()
        self._ready = asyncio.Event()

    def put(self, events: list[Event], stats: Stats) -> None:
        """Appends events that the engine has emitted."""
        self._stats = stats
        for event in events:
            if event.sequence_id in self._held or _has_inline_rows(event):
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
        """All small events that wait, then at most one piece of prompt rows; waits until there is any."""
        while self.empty:
            self._ready.clear()
            await self._ready.wait()
        events = list(self._small)
        self._small.clear()
        if self._held:
            events += self._next_held()
        return events, self._stats

    def _next_held(self) -> list[Event]:
        """The oldest sequence's next piece, and the small events right behind it."""
        sequence_id, held = next(iter(self._held.items()))
        first = held.popleft()
        events = [first.event]
        if first.ends_chunk:
            self._leaving = sequence_id
        while held and not _has_inline_rows(held[0].event):
            events.append(held.popleft().event)
        if not held:
            del self._held[sequence_id]
        return events


@dataclass(frozen=True, slots=True)
class _Held:
    """An event that waits; `ends_chunk` marks the last piece of a prompt chunk's rows."""

    event: Event
    ends_chunk: bool


def _has_inline_rows(event: Event) -> bool:
    return isinstance(event, Prefilled) and event.rows is not None and event.rows.inline


def _pieces(event: Event) -> Iterator[_Held]:
    """The event itself, or its rows in pieces; the first carries what else there is to say."""
    if not isinstance(event, Prefilled) or event.rows is None or not isinstance(event.rows.tensor, torch.Tensor):
        yield _Held(event, ends_chunk=False)
        return
    rows, tensor = event.rows, event.rows.tensor
    row_bytes = tensor.shape[1] * tensor.element_size()
    parts = tensor.split(max(PIECE_BYTES // row_bytes, 1))
    position = rows.first_position
    for part in parts:
        logprobs = event.prompt_logprobs if part is parts[0] else []
        piece = replace(event, rows=Rows(position, part), prompt_logprobs=logprobs)
        yield _Held(piece, ends_chunk=part is parts[-1])
        position += len(part)
