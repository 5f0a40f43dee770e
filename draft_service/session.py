"""One Propose stream: it owns its sequences, and when it ends, all of them are freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from draft_service.commands import Answer, Close, Command, Open
from draft_service.sequence import DraftSequence
from draft_service.validation import CommandRules, read_extend, read_sampling, release_rows
from outrider.errors import InvalidArgument, NotFound, OutriderError, to_status
from outrider.stream import Outbox
from outrider.v1 import draft_pb2


def propose_response(events: Iterable[Answer | draft_pb2.DraftEvent]) -> draft_pb2.ProposeResponse:
    """A message of what a session's outbox has, in its order: chains, and errors as they are."""
    response = draft_pb2.ProposeResponse()
    for event in events:
        message = response.events.add()
        if isinstance(event, Answer):
            event.begin(message, event.sequence.sequence_id)
            event.finish(message)
        else:
            message.CopyFrom(event)
    return response


class Session:
    """Translates between the stream's messages and the engine. Event loop only."""

    def __init__(self, rules: CommandRules, submit: Callable[[list[Command]], None]) -> None:
        self._rules = rules
        self._submit = submit
        self._commands: list[Command] = []
        self.sequences: dict[int, DraftSequence] = {}
        self.outbox: Outbox[Answer | draft_pb2.DraftEvent] = Outbox()

    def dispatch(self, request: object) -> None:
        """Applies the commands of one message. A bad one fails its sequence only."""
        assert isinstance(request, draft_pb2.ProposeRequest)
        for command in request.commands:
            try:
                self._apply(command)
            except OutriderError as error:
                self._fail(command.sequence_id, error)
        self._flush()

    def answer(self, answer: Answer) -> None:
        """Sends what the engine answered for one of the sequences, unless it was closed since."""
        sequence = answer.sequence
        if self.sequences.get(sequence.sequence_id) is not sequence:
            return
        if answer.error is not None:
            self._fail(sequence.sequence_id, answer.error)
            self._flush()
            return
        self.outbox.put(answer)

    def close(self) -> None:
        """Frees all sequences."""
        for sequence_id in list(self.sequences):
            self._free(sequence_id)
        self._flush()
        self.outbox.close()

    def _apply(self, command: draft_pb2.DraftCommand) -> None:
        kind = command.WhichOneof("command")
        sequence_id = command.sequence_id
        if kind == "extend":
            sequence = self.sequences.get(sequence_id)
            if sequence is None:
                release_rows(command.extend, self._rules)
                raise NotFound(f"sequence_id: no open sequence {sequence_id} in this session")
            self._commands.append(read_extend(command.extend, sequence, self._rules))
        elif kind == "open":
            if sequence_id in self.sequences:
                raise InvalidArgument("sequence_id", f"sequence {sequence_id} is open already; both are freed")
            sampling = read_sampling(command.open.sampling, self._rules)
            sequence = DraftSequence(self, sequence_id, sampling, command.open.request_id, command.open.link_id)
            self.sequences[sequence_id] = sequence
            self._commands.append(Open(sequence))
        elif kind == "close":
            self._free(sequence_id)
        else:
            raise InvalidArgument("command", "expected open, extend or close, found none")

    def _fail(self, sequence_id: int, error: Exception) -> None:
        """Frees the sequence and says why."""
        self._free(sequence_id)
        self.outbox.put(draft_pb2.DraftEvent(sequence_id=sequence_id, error=to_status(error)))

    def _free(self, sequence_id: int) -> None:
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is not None:
            self._commands.append(Close(sequence))

    def _flush(self) -> None:
        if self._commands:
            self._submit(self._commands)
            self._commands = []
