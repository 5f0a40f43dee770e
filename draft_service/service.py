"""The draft's RPCs: they only translate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from draft_service.commands import Answer, Command
from draft_service.session import Session, propose_response
from draft_service.validation import CommandRules
from outrider.errors import OutriderError, Unavailable, abort
from outrider.stream import serve_stream
from outrider.v1 import draft_pb2, draft_pb2_grpc

_POLL_SECONDS = 0.02


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """DraftService over the engine. UNAVAILABLE until `serve` was called."""

    def __init__(self, submit: Callable[[list[Command]], None]) -> None:
        self._submit = submit
        self._rules: CommandRules | None = None
        self._info: Callable[[], draft_pb2.GetDraftInfoResponse] | None = None
        self._sessions: dict[Session, OutriderError | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def serve(self, rules: CommandRules, info: Callable[[], draft_pb2.GetDraftInfoResponse]) -> None:
        """Answers from now on. `info` is asked at each GetDraftInfo."""
        self._rules, self._info = rules, info

    async def end_sessions(self, error: OutriderError) -> None:
        """Ends every session with an error; returns once they are gone."""
        self._rules = self._info = None
        for session in self._sessions:
            self._sessions[session] = error
            session.close()
        await self._idle.wait()

    async def finished(self) -> None:
        """Returns once no sequence is open; streams that hold none are nobody's loss."""
        while any(session.sequences for session in self._sessions):
            await asyncio.sleep(_POLL_SECONDS)

    @staticmethod
    def deliver(answers: list[Answer]) -> None:
        """Hands the engine's answers to the sessions; event loop only."""
        for answer in answers:
            answer.sequence.owner.answer(answer)

    def debug_table(self) -> str:
        """Sessions and their sequences, one a line."""
        lines = [f"{len(self._sessions)} sessions"]
        for number, session in enumerate(self._sessions):
            for sequence_id, sequence in session.sequences.items():
                lines.append(
                    f"session {number} sequence {sequence_id} request {sequence.request_id!r} "
                    f"positions {sequence.start}..{sequence.end} pages {len(sequence.pages)}"
                )
        return "\n".join(lines)

    async def GetDraftInfo(
        self, request: draft_pb2.GetDraftInfoRequest, context: grpc.aio.ServicerContext
    ) -> draft_pb2.GetDraftInfoResponse:
        """What this draft serves."""
        if self._info is None:
            await abort(context, Unavailable("the draft is still loading"))
        return self._info()

    async def Propose(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        """The hot path: one session."""
        if self._rules is None:
            await abort(context, Unavailable("the draft is still loading"))
        session = Session(self._rules, self._submit)
        self._sessions[session] = None
        self._idle.clear()
        try:
            await serve_stream(context, session.dispatch, session.outbox, propose_response)
        finally:
            session.close()
            error = self._sessions.pop(session)
            if not self._sessions:
                self._idle.set()
        if error is not None:
            await abort(context, error)
