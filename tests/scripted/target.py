"""`python -m tests.scripted.target`: a TargetService around the scripted model, with faults to order."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from dataclasses import dataclass
from typing import Annotated

import grpc
import typer
from prometheus_client import Gauge

from outrider import errors
from outrider.server import ServiceFrame, configure_logging
from outrider.settings import run_command
from outrider.stream import Outbox, serve_stream
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.scripted import tokenizer
from tests.scripted.language import END_ID, VOCAB_SIZE, Script, ordered

Command, Event = target_pb2.TargetCommand, target_pb2.TargetEvent
HIDDEN_SIZE, BOUNDARIES = 1, (1, 2)


@dataclass
class Behaviour:
    """What the process does, its faults included. A request may order otherwise for itself, by its id."""

    model: str
    max_sequence_length: int
    max_draft_tokens: int
    prefill_chunk: int
    delay: float
    die_after: int  # advances, then the process is gone
    preempt_every: int  # advances of the process
    refuse_at: int  # a port: who listens there has a full queue; 1 is everyone
    break_on: int  # a stream that brings this token is broken
    synthetic: bool
    vocab_size: int
    bare: bool  # no tokenizer


class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """All sessions of the process."""

    def __init__(self, behaviour: Behaviour, frame: ServiceFrame) -> None:
        self.behaviour = behaviour
        self.frame = frame
        self.instance_id = secrets.token_hex(8)
        self.num_advances = 0
        self.sessions: set[Session] = set()
        Gauge("outrider_num_sequences", "Sequences held.", registry=frame.registry).set_function(
            lambda: sum(len(session.scripts) for session in tuple(self.sessions))
        )

    async def GetTargetInfo(self, request, context) -> target_pb2.GetTargetInfoResponse:
        behaviour = self.behaviour
        files = b"".join(tokenizer.files().values())
        return target_pb2.GetTargetInfoResponse(
            model=behaviour.model,
            architecture="Scripted",
            instance_id=self.instance_id,
            vocab_size=behaviour.vocab_size,
            hidden_size=HIDDEN_SIZE,
            num_layers=2,
            max_sequence_length=behaviour.max_sequence_length,
            aux_boundaries=[0, *BOUNDARIES, 3],
            weights_fingerprint="scripted",
            eos_token_ids=[END_ID],
            kv_cache_tokens=1 << 20,
            max_sequences=256,
            max_draft_tokens=behaviour.max_draft_tokens,
            transports=[common_pb2.TRANSPORT_INLINE],
            tokenizer_sha256="" if behaviour.bare else hashlib.sha256(files).hexdigest(),
            vocabulary_sha256="" if behaviour.bare else "scripted",
            synthetic=behaviour.synthetic,
        )

    async def FetchTokenizer(self, request, context) -> None:
        for file, data in tokenizer.files().items():
            for start in range(0, len(data), 1000):
                piece = data[start : start + 1000]
                await context.write(target_pb2.FetchTokenizerResponse(file=file, data=piece))
        digest = hashlib.sha256(b"".join(tokenizer.files().values())).hexdigest()
        await context.write(target_pb2.FetchTokenizerResponse(sha256=digest))

    async def Verify(self, request_iterator, context: grpc.aio.ServicerContext) -> None:
        session = Session(self)
        self.sessions.add(session)
        try:
            await serve_stream(context, session.dispatch, session.outbox, _to_message)
        finally:
            self.sessions.discard(session)

    async def drained(self) -> None:
        """Returns once no session holds a sequence."""
        while any(session.scripts for session in self.sessions):
            await asyncio.sleep(0.02)

    def drain_rest(self) -> None:
        """Gives up the sequences that did not move."""
        for session in self.sessions:
            for sequence_id in list(session.scripts):
                session.fail(sequence_id, errors.Unavailable("draining", errors.DRAINING))


class Session:
    """One Verify stream."""

    def __init__(self, target: ScriptedTarget) -> None:
        self._target = target
        self.scripts: dict[int, tuple[Script, Command.OpenSequence]] = {}
        self.behaviours: dict[int, Behaviour] = {}
        self.aux: dict[int, Command.AuxRequest] = {}
        self.outbox: Outbox[Event] = Outbox()
        self._used: set[int] = set()

    def dispatch(self, request: target_pb2.VerifyRequest) -> None:
        """Takes commands in."""
        for command in request.commands:
            kind = command.WhichOneof("command")
            if kind == "open":
                self.behaviours[command.sequence_id] = ordered(self._target.behaviour, command.open.request_id)
            if kind == "close":
                self.scripts.pop(command.sequence_id, None)
            else:
                delay = self.behaviours[command.sequence_id].delay
                arguments = (self._open if kind == "open" else self._advance, command)
                if delay:
                    asyncio.get_running_loop().call_later(delay, self._guarded, *arguments)
                else:
                    self._guarded(*arguments)

    def fail(self, sequence_id: int, error: errors.OutriderError) -> None:
        """Ends one sequence with an error."""
        self.scripts.pop(sequence_id, None)
        self.outbox.put(Event(sequence_id=sequence_id, error=errors.to_status(error)))

    def _guarded(self, handle, command: Command) -> None:
        try:
            handle(command)
        except errors.OutriderError as error:
            self.fail(command.sequence_id, error)

    def _open(self, command: Command) -> None:
        target, sequence_id, opened = self._target, command.sequence_id, command.open
        behaviour = self.behaviours[sequence_id]
        assert sequence_id not in self._used, "a sequence id was used twice"
        self._used.add(sequence_id)
        if behaviour.break_on in opened.token_ids:
            raise RuntimeError("poison")
        if target.frame.draining:
            raise errors.Unavailable("draining", errors.DRAINING)
        if behaviour.refuse_at in (1, int(target.frame.address.rpartition(":")[2])):
            raise errors.ResourceExhausted("the queue is full", errors.QUEUE_FULL)
        script = Script(opened, tokenizer.choices(), behaviour.max_sequence_length)
        self.scripts[sequence_id] = (script, opened)
        self.aux[sequence_id] = opened.aux
        self._prefill(sequence_id, script, opened)
        self._emit(sequence_id, [])

    def _prefill(self, sequence_id: int, script: Script, opened: Command.OpenSequence) -> None:
        total = len(script.tokens)
        for start in range(0, total, self.behaviours[sequence_id].prefill_chunk):
            end = min(total, start + self.behaviours[sequence_id].prefill_chunk)
            event = Event(sequence_id=sequence_id, prefilled=Event.Prefilled(num_computed=end))
            first = max(start, opened.aux.first_position)
            last = min(end, total - 1)  # the row of the last position comes with the first Advanced
            if opened.aux.boundaries and last > first:
                event.prefilled.hidden_states.CopyFrom(script.rows(first, last - first))
            if opened.HasField("prompt_logprobs"):
                event.prefilled.first_logprob_position = max(start, 1)
                for position in range(max(start, 1), end):
                    event.prefilled.prompt_logprobs.add(logprob=-float(script.tokens[position]), rank=1)
            self.outbox.put(event)

    def _advance(self, command: Command) -> None:
        target = self._target
        target.num_advances += 1
        behaviour = self.behaviours[command.sequence_id]
        if behaviour.die_after and target.num_advances > behaviour.die_after:
            os._exit(1)
        if command.sequence_id not in self.scripts:
            raise errors.NotFound(f"sequence {command.sequence_id} is not open")
        if behaviour.preempt_every and target.num_advances % behaviour.preempt_every == 0:
            raise errors.ResourceExhausted("out of pages", errors.PREEMPTED)
        advance = command.advance
        if len(advance.draft_token_ids) > behaviour.max_draft_tokens:
            raise errors.InvalidArgument("advance.draft_token_ids", "too long")
        if any(token_id >= behaviour.vocab_size for token_id in advance.draft_token_ids):
            raise errors.InvalidArgument("advance.draft_token_ids", "out of range")
        if advance.HasField("aux"):
            self.aux[command.sequence_id] = advance.aux
        self._emit(command.sequence_id, advance.draft_token_ids)

    def _emit(self, sequence_id: int, chain) -> None:
        """Verifies a chain: emits what the script says for as long as the chain agrees, then one token more."""
        script, opened = self.scripts[sequence_id]
        first = len(script.tokens) - 1
        advanced = Event.Advanced()
        for proposed in (*chain, None):
            token_id = script.next_token()
            advanced.token_ids.append(token_id)
            accepted = token_id == proposed
            advanced.num_accepted += accepted
            advanced.finish_reason = script.append(token_id)
            if opened.HasField("logprobs"):
                advanced.logprobs.add(logprob=-float(token_id), rank=1 + len(script.tokens))
            if advanced.finish_reason or not accepted:
                break
        if self.aux[sequence_id].boundaries:
            advanced.hidden_states.CopyFrom(script.rows(first, len(advanced.token_ids)))
        if advanced.finish_reason:
            del self.scripts[sequence_id]
        compute_us = int(self.behaviours[sequence_id].delay * 1e6)
        self.outbox.put(Event(sequence_id=sequence_id, advanced=advanced, compute_us=compute_us))


def _to_message(events: list[Event]) -> target_pb2.VerifyResponse:
    return target_pb2.VerifyResponse(events=events, stats=target_pb2.StepStats(batch_size=len(events)))


async def serve(behaviour: Behaviour, listen: str, metrics_listen: str, grace: float) -> None:
    """Runs until a signal, and drains as a target does."""
    frame = ServiceFrame("target", "outrider.v1.TargetService", listen, metrics_listen)
    target = ScriptedTarget(behaviour, frame)
    frame.debug_table = lambda: "\n".join(str(sorted(session.scripts)) for session in target.sessions)
    await frame.start(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server))
    await frame.set_serving(True)
    frame.become_ready()
    await frame.run_until_signal()
    asyncio.get_running_loop().call_later(max(0.0, grace - 5), target.drain_rest)
    await frame.drain(target.drained, grace)


def main(
    listen: str = "127.0.0.1:0",
    metrics_listen: str = "127.0.0.1:0",
    model: str = "scripted",
    max_sequence_length: int = 4096,
    max_draft_tokens: int = 8,
    prefill_chunk: int = 16,
    delay: float = 0.0,
    die_after: int = 0,
    preempt_every: int = 0,
    refuse_at: int = 0,
    break_on: int = -1,
    synthetic: bool = False,
    vocab_size: int = VOCAB_SIZE,
    bare: bool = False,
    grace: Annotated[float, typer.Option()] = 30.0,
) -> None:
    """A target whose next token is a hash of all before it."""
    configure_logging("info", "target")
    behaviour = Behaviour(
        model, max_sequence_length, max_draft_tokens, prefill_chunk, delay, die_after, preempt_every, refuse_at,
        break_on, synthetic, vocab_size, bare,
    )  # fmt: skip
    asyncio.run(serve(behaviour, listen, metrics_listen, grace))


if __name__ == "__main__":
    run_command(main, "scripted-target")
