"""Pair-local rounds, the draft's end: the target asks for chains itself, engine to engine. Engine's thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from google.protobuf.message import DecodeError

from draft_service.commands import Answer, Ask, Command
from draft_service.sequence import DraftSequence, Extend
from draft_service.validation import CommandRules, read_extend, release_rows
from outrider.errors import InvalidArgument, NotFound, OutriderError, to_status
from outrider.pair_socket import PairSocket
from outrider.v1 import draft_pb2

log = logging.getLogger(__name__)


class PairLink:
    """The socket of the attachment: what comes through it are commands for the engine."""

    def __init__(self, end: PairSocket, rules: CommandRules, on_end: Callable[[], None]) -> None:
        """`on_end` is called, in the engine's thread, when it has ended, whoever ended it."""
        self._end = end
        self._rules = rules
        self._on_end = on_end
        self.fileno, self.shut_down = end.fileno, end.shut_down

    @property
    def ended(self) -> bool:
        """Whether the target is gone, or the attachment has ended."""
        return self._end.ended

    def close(self) -> None:
        """Gives the descriptor back."""
        self._end.close()
        self._on_end()

    def read(self) -> list[list[Command]]:
        """What the target asks for, the commands of a packet together."""
        batches: list[list[Command]] = []
        try:
            for packet in self._end.receive():
                messages = draft_pb2.ProposeRequest.FromString(packet).commands
                batches.append([Ask(self, message) for message in messages])
        except DecodeError:
            log.error("the target's socket: expected a ProposeRequest, found another packet")
            self._end.ended = True
        return batches

    def read_extend(self, ask: Ask, sequence: DraftSequence | None) -> Extend | None:
        """The rows for a sequence, checked; None, and the target is told, where that cannot be."""
        command = ask.message
        try:
            if not command.HasField("extend"):
                raise InvalidArgument("command", "expected extend, and nothing else through a pair's socket")
            if sequence is None:
                release_rows(command.extend, self._rules)
                raise NotFound(f"link_id: no open sequence {command.sequence_id}")
            extend = read_extend(command.extend, sequence, self._rules)
        except OutriderError as error:
            self.refuse(command.sequence_id, error)
            return None
        extend.link = self
        return extend

    def begin(self, answers: Iterable[Answer]) -> draft_pb2.ProposeResponse:
        """What `answer` will send, while a step still computes the chains."""
        message = draft_pb2.ProposeResponse()
        for answer in answers:
            answer.begin(message.events.add(), answer.sequence.link_id)
        return message

    def answer(self, answers: Iterable[Answer], begun: draft_pb2.ProposeResponse) -> None:
        """Sends the chains that a step proposed. A target that is gone is known by the end of the attachment."""
        for answer, event in zip(answers, begun.events, strict=True):
            answer.finish(event)
        self._send(begun)

    def refuse(self, link_id: int, error: Exception) -> None:
        """There will be no chain."""
        event = draft_pb2.DraftEvent(sequence_id=link_id, error=to_status(error))
        self._send(draft_pb2.ProposeResponse(events=[event]))

    def _send(self, message: draft_pb2.ProposeResponse) -> None:
        if not self._end.send(message):
            self._end.shut_down()
