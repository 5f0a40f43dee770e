"""`python -m tests.scripted.draft`: a DraftService that proposes right and wrong tokens at every place, and misbehaves.

Beside the scripted target it reads the truth from the rows, and audits every row that it is given. Beside a real
target it knows the truth from an oracle: a JSON file of whole sequences recorded without speculation.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import grpc
import typer
from prometheus_client import Counter, Gauge

from outrider import errors
from outrider.channels import connect
from outrider.pair_socket import FEATURE, PairSocket
from outrider.server import ServiceFrame, configure_logging
from outrider.settings import run_command
from outrider.stream import Outbox, serve_stream
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.scripted import tokenizer
from tests.scripted.language import absorb, choose, effective_seed, ordered

Command, Event = draft_pb2.DraftCommand, draft_pb2.DraftEvent


class Oracle:
    """Whole sequences from a JSON file, which is read again whenever it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, int] | None = None
        self._sequences: list[Sequence[int]] = []

    def sequences(self) -> list[Sequence[int]]:
        """All sequences as the file has them now."""
        stat = self._path.stat()
        if self._read != (stat.st_mtime_ns, stat.st_size):
            self._read = (stat.st_mtime_ns, stat.st_size)
            self._sequences = json.loads(self._path.read_text())
        return self._sequences


@dataclass
class Behaviour:
    """What the process does, its faults included. A request may order otherwise for itself, by its id."""

    model: str
    max_draft_tokens: int
    max_sequence_length: int
    pattern: str
    delay: float
    stall_after: int  # proposals of a sequence, then none is answered
    die_after: int  # proposals of the process, then the process is gone
    fail_every: int  # proposals of a sequence, then the sequence fails
    fault: str  # empty, long, range or stale: what every third proposal is
    fingerprint: str
    oracle: Oracle | None


@dataclass
class Sequence_:
    """What the draft knows of one sequence."""

    seed: int
    behaviour: Behaviour
    state: int = 0
    num_proposals: int = 0
    next_position: int = 0  # of the token that comes after all it was told
    candidates: list[Sequence[int]] | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    places: int = 0  # seed of the pattern of that name


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """All sessions of the process."""

    def __init__(self, behaviour: Behaviour, frame: ServiceFrame, info: target_pb2.GetTargetInfoResponse) -> None:
        self.behaviour = behaviour
        self.target = info
        self.instance_id = secrets.token_hex(8)
        self.num_proposals = 0
        self.sessions: set[Session] = set()
        self.attached = False
        # What the target may ask for itself, by its link_id.
        self.linked: dict[int, tuple[Session, int]] = {}
        self.audit_failures = Counter("outrider_audit_failures", "Rows that were wrong.", registry=frame.registry)
        self.rows = Counter("outrider_rows", "Rows taken in.", registry=frame.registry)
        Gauge("outrider_num_sequences", "Sequences held.", registry=frame.registry).set_function(
            lambda: sum(len(session.sequences) for session in tuple(self.sessions))
        )

    async def GetDraftInfo(self, request, context) -> draft_pb2.GetDraftInfoResponse:
        target = self.target
        return draft_pb2.GetDraftInfoResponse(
            model=self.behaviour.model,
            architecture="Scripted",
            instance_id=self.instance_id,
            target_instance_id=target.instance_id,
            weights_fingerprint=self.behaviour.fingerprint or target.weights_fingerprint,
            aux_boundaries=target.aux_boundaries[1:3],
            draft_vocab_size=target.vocab_size,
            max_draft_tokens=self.behaviour.max_draft_tokens,
            max_sequence_length=self.behaviour.max_sequence_length,
            transports=[common_pb2.TRANSPORT_SHARED_MEMORY] * self.attached + [common_pb2.TRANSPORT_INLINE],
            features=[FEATURE] * self.attached,
            vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            vocabulary_sha256=target.vocabulary_sha256,
        )

    async def Propose(self, request_iterator, context: grpc.aio.ServicerContext) -> None:
        session = Session(self)
        self.sessions.add(session)
        try:
            await serve_stream(
                context, session.dispatch, session.outbox, lambda events: draft_pb2.ProposeResponse(events=events)
            )
        finally:
            self.sessions.discard(session)

    async def attach(self, stub: target_pb2_grpc.TargetServiceStub) -> None:
        """Takes part in pair-local rounds. Rows of an attached draft are never read: it has an oracle."""
        call = stub.Attach()
        transports = [common_pb2.TRANSPORT_SHARED_MEMORY]
        hello = {"draft_instance_id": self.instance_id, "transports": transports, "pair_rounds": True}
        await call.write(target_pb2.AttachRequest(draft=hello))
        answer = await call.read()
        end = PairSocket.connect(answer.socket_name)
        await call.write(target_pb2.AttachRequest(opened={}))
        self.attached, self._attachment = True, call
        asyncio.get_running_loop().add_reader(end.fileno(), self._asked, end)

    def _asked(self, end: PairSocket) -> None:
        for packet in end.receive():
            for command in draft_pb2.ProposeRequest.FromString(packet).commands:
                link_id = command.sequence_id
                session, command.sequence_id = self.linked.get(link_id, (None, 0))
                answer = functools.partial(_answer, end, link_id)
                if session is None:
                    answer(Event(error=errors.to_status(errors.NotFound("link_id"))))
                else:
                    session.apply(command, answer)
        if end.ended:
            asyncio.get_running_loop().remove_reader(end.fileno())


def _answer(end: PairSocket, link_id: int, event: Event) -> None:
    event.sequence_id = link_id
    end.send(draft_pb2.ProposeResponse(events=[event]))


class Session:
    """One Propose stream."""

    def __init__(self, draft: ScriptedDraft) -> None:
        self._draft = draft
        self.sequences: dict[int, Sequence_] = {}
        self.outbox: Outbox[Event] = Outbox()

    def dispatch(self, request: draft_pb2.ProposeRequest) -> None:
        """Takes commands in."""
        for command in request.commands:
            self.apply(command, self.outbox.put)

    def apply(self, command: Command, answer: Callable[[Event], None]) -> None:
        """Takes one in; its answer goes where it came from, and so does what ends its sequence."""
        kind, sequence_id = command.WhichOneof("command"), command.sequence_id
        if kind == "open":
            behaviour = ordered(self._draft.behaviour, command.open.request_id)
            sampling = command.open.sampling
            self.sequences[sequence_id] = Sequence_(effective_seed(sampling), behaviour, places=sampling.seed)
            self._draft.linked[command.open.link_id] = self, sequence_id
        elif kind == "close":
            self.sequences.pop(sequence_id, None)
        elif sequence_id in self.sequences:
            try:
                self._extend(sequence_id, command.extend, answer)
            except errors.OutriderError as error:
                self._fail(sequence_id, error, answer)
        else:
            self._fail(sequence_id, errors.NotFound(f"sequence {sequence_id} is not open"), answer)

    def _fail(self, sequence_id: int, error: errors.OutriderError, answer: Callable[[Event], None]) -> None:
        self.sequences.pop(sequence_id, None)
        answer(Event(sequence_id=sequence_id, error=errors.to_status(error)))

    def _extend(self, sequence_id: int, extend: Command.ExtendDraft, answer: Callable[[Event], None]) -> None:
        draft, sequence = self._draft, self.sequences[sequence_id]
        behaviour = sequence.behaviour
        count, _ = extend.hidden_states.tensor.shape
        if count != len(extend.token_ids):
            draft.audit_failures.inc()
            raise errors.InvalidArgument("extend.token_ids", f"expected {count}, found {len(extend.token_ids)}")
        draft.rows.inc(count)
        first = extend.hidden_states.first_position
        if behaviour.oracle:
            self._narrow(sequence, behaviour.oracle, first, extend.token_ids)
        else:
            self._audit(sequence, first, extend)
        sequence.next_position = first + count + 1
        if extend.num_draft_tokens:
            draft.num_proposals += 1
            sequence.num_proposals += 1
            if behaviour.die_after and draft.num_proposals > behaviour.die_after:
                os._exit(1)
            if behaviour.fail_every and sequence.num_proposals % behaviour.fail_every == 0:
                raise errors.Internal("a scripted failure")
            if behaviour.stall_after and sequence.num_proposals > behaviour.stall_after:
                return
            proposal = self._proposal(sequence, extend.num_draft_tokens)
            event = Event(sequence_id=sequence_id, proposal=proposal, compute_us=int(behaviour.delay * 1e6))
            if behaviour.delay:
                asyncio.get_running_loop().call_later(behaviour.delay, answer, event)
            else:
                answer(event)

    def _audit(self, sequence: Sequence_, first: int, extend: Command.ExtendDraft) -> None:
        """Row i must be of position first + i, follow from the row before it, and pair with the token after it."""
        data = extend.hidden_states.tensor.data
        for index, token_id in enumerate(extend.token_ids):
            position = int.from_bytes(data[16 * index : 16 * index + 8], "little")
            state = int.from_bytes(data[16 * index + 8 : 16 * index + 16], "little")
            follows = index == 0 or state == sequence.state
            contiguous = index > 0 or first != sequence.next_position - 1 or state == sequence.state
            if position != first + index or not follows or not contiguous:
                self._draft.audit_failures.inc()
                raise errors.InvalidArgument("extend.hidden_states", f"row {index} at {first} is wrong")
            sequence.state = absorb(state, token_id)

    def _narrow(self, sequence: Sequence_, oracle: Oracle, first: int, token_ids: Sequence[int]) -> None:
        """Keeps the recorded sequences that agree with what was emitted so far."""
        for index, token_id in enumerate(token_ids):
            position = first + index + 1
            if sequence.candidates is None:
                sequence.candidates = oracle.sequences()
            sequence.candidates = [s for s in sequence.candidates if position < len(s) and s[position] == token_id]

    def _truth(self, sequence: Sequence_, count: int) -> list[int]:
        if sequence.behaviour.oracle:
            known = (sequence.candidates or [[]])[0]
            return list(known[sequence.next_position : sequence.next_position + count])
        state, tokens = sequence.state, []
        for _ in range(count):
            tokens.append(choose(state, sequence.seed, tokenizer.choices()))
            state = absorb(state, tokens[-1])
        return tokens

    def _proposal(self, sequence: Sequence_, count: int) -> Event.Proposal:
        behaviour = sequence.behaviour
        position, vocab_size = sequence.next_position, self._draft.target.vocab_size
        count = min(count, behaviour.max_draft_tokens)
        if position >= behaviour.max_sequence_length:
            count = 0
        token_ids = self._truth(sequence, count)
        for place in range(len(token_ids)):
            if _is_wrong(behaviour.pattern, sequence, place, count):
                token_ids[place] = (token_ids[place] + 1 + position % 5) % vocab_size
        if behaviour.fault and sequence.num_proposals % 3 == 0:
            token_ids, position = _spoil(behaviour.fault, token_ids, position, vocab_size)
        return Event.Proposal(token_ids=token_ids, probabilities=[0.5] * len(token_ids), first_position=position)


def _is_wrong(pattern: str, sequence: Sequence_, place: int, count: int) -> bool:
    """Whether the place of a chain is spoilt.

    `cycle` and `places` spoil one or none, so that every length is accepted: by the chain's position alone, or by that
    and the request's seed.
    """
    position = sequence.next_position
    if pattern == "right":
        return False
    if pattern == "wrong":
        return True
    if pattern == "random":
        return sequence.rng.random() < 0.3
    if pattern == "places":
        return place == random.Random(f"{sequence.places} {position}").randrange(count + 1)
    return place == (position * 2654435761 >> 8) % (count + 1)


def _spoil(fault: str, token_ids: list[int], position: int, vocab_size: int) -> tuple[list[int], int]:
    if fault == "empty":
        return [], position
    if fault == "long":
        return token_ids + token_ids + [5, 6, 7], position
    if fault == "range":
        return [*token_ids[:1], vocab_size + 7, 4_000_000_000], position
    return token_ids, position - 1


async def serve(behaviour: Behaviour, target: str, attach: bool, listen: str, metrics_listen: str) -> None:
    """Asks the target what it is, attaches to it where it is to, and runs until a signal."""
    frame = ServiceFrame("draft", "outrider.v1.DraftService", listen, metrics_listen)
    stub = target_pb2_grpc.TargetServiceStub(connect(target))
    info = await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest(), wait_for_ready=True, timeout=30)
    draft = ScriptedDraft(behaviour, frame, info)
    if attach:
        await draft.attach(stub)
    frame.debug_table = lambda: "\n".join(str(sorted(session.sequences)) for session in draft.sessions)
    await frame.start(lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server))
    await frame.set_serving(True)
    frame.become_ready()
    await frame.run_until_signal()

    async def nothing() -> None:
        return

    await frame.drain(nothing, 1.0)


def main(
    target: Annotated[str, typer.Option()],
    listen: str = "127.0.0.1:0",
    metrics_listen: str = "127.0.0.1:0",
    model: str = "scripted-draft",
    max_draft_tokens: int = 8,
    max_sequence_length: int = 1 << 20,
    pattern: str = "cycle",
    delay: float = 0.0,
    stall_after: int = 0,
    die_after: int = 0,
    fail_every: int = 0,
    fault: str = "",
    fingerprint: str = "",
    oracle: Path | None = None,
    attach: bool = False,
) -> None:
    """A draft that is right and wrong as ordered."""
    configure_logging("info", "draft")
    behaviour = Behaviour(
        model, max_draft_tokens, max_sequence_length, pattern, delay, stall_after, die_after, fail_every, fault,
        fingerprint, Oracle(oracle) if oracle else None,
    )  # fmt: skip
    asyncio.run(serve(behaviour, target, attach, listen, metrics_listen))


if __name__ == "__main__":
    run_command(main, "scripted-draft")
