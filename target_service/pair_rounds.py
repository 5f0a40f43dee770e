"""Rounds that a pair runs by itself: the target asks the draft for the next chain, and verifies it when it comes.

What the gateway would pass on goes from engine to engine instead, in the same messages; the gateway hears of every
round as it ends, and its grant says how far the pair may go. Under a grant that names no draft the target makes steps
without a chain, one after the other. Engine's thread only.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from google.protobuf.message import DecodeError
from google.rpc import code_pb2

from outrider.pair_socket import PairSocket
from outrider.v1 import draft_pb2, target_pb2
from target_service.commands import Advance, Command, PairRound, Proposed, Rows, Unlinked
from target_service.limits import Limits
from target_service.sequence import Sequence

log = logging.getLogger(__name__)

_Round = target_pb2.TargetEvent.PairRound
# What a draft answers of a sequence that its gateway has closed there, as it does here in the same moment.
_GONE = (code_pb2.NOT_FOUND, code_pb2.CANCELLED)


class PairLink:
    """The socket towards one draft: what comes through it are commands for the engine."""

    def __init__(self, draft_instance_id: str, end: PairSocket) -> None:
        self.draft_instance_id = draft_instance_id
        self._end = end
        self.fileno, self.send, self.shut_down, self.close = end.fileno, end.send, end.shut_down, end.close

    @property
    def ended(self) -> bool:
        """Whether the draft is gone."""
        return self._end.ended

    def read(self) -> list[Command]:
        """What the draft answered."""
        commands: list[Command] = []
        try:
            for packet in self._end.receive():
                commands.append(Proposed(self, draft_pb2.ProposeResponse.FromString(packet).events))
        except DecodeError:
            log.error("draft %s: expected a ProposeResponse, found another packet", self.draft_instance_id)
            self._end.ended = True
        if self.ended:
            commands.append(Unlinked(self))
        return commands


Name = tuple[PairLink, int]  # of a sequence, as its draft knows it: by its link_id


@dataclass(slots=True)
class Wait:
    """A chain that was asked for: when, for how many tokens, and until when it is waited for."""

    asked: float
    num_tokens: int
    deadline: float


class PairRounds:
    """All links, and the sequences whose next chain is on its way through one."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._links: dict[str, PairLink] = {}
        self._sequences: dict[Name, Sequence] = {}
        self._names: dict[Sequence, Name] = {}
        self._waiting: set[Sequence] = set()
        # What a step asks for, one packet a draft, and the commands in them that the step's results are still to end.
        self._requests: dict[PairLink, draft_pb2.ProposeRequest] = {}
        self._begun: dict[Sequence, draft_pb2.DraftCommand.ExtendDraft] = {}

    def link(self, link: PairLink) -> None:
        """A draft has connected."""
        if not link.ended:
            self._links[link.draft_instance_id] = link

    def unlink(self, link: PairLink) -> None:
        """A draft is gone: what waits for it goes on without a chain."""
        if self._links.get(link.draft_instance_id) is link:
            del self._links[link.draft_instance_id]
        for sequence in [sequence for sequence in self._waiting if self._names[sequence][0] is link]:
            self._without_chain(sequence, _Round.NO_CHAIN_LOST)

    def begin(self) -> None:
        """A step has been queued; what was begun for one that failed is forgotten."""
        self._requests.clear()
        self._begun.clear()

    def prepare(self, sequence: Sequence, rows: Rows) -> None:
        """Begins what `hand_over` will ask for, while the device computes: all but the tokens that it chooses."""
        grant, tensor = sequence.grant, rows.tensor
        if (
            grant is None
            or isinstance(tensor, torch.Tensor)
            or sequence.aux.draft_instance_id != grant.draft_instance_id
        ):
            return
        if (link := self._links.get(grant.draft_instance_id)) is None:
            return
        request = self._requests.get(link)
        if request is None:
            request = self._requests[link] = draft_pb2.ProposeRequest()
        extend = self._begun[sequence] = request.commands.add(sequence_id=grant.link_id).extend
        states = extend.hidden_states
        states.first_position = rows.first_position
        states.tensor.CopyFrom(tensor)
        rows.tensor = states.tensor  # so that it is the message whose rows become fewer

    def hand_over(self, sequence: Sequence, rows: Rows | None, token_ids: list[int]) -> bool:
        """Asks the draft for the chain that follows `token_ids`, which were just emitted, with their rows.

        Without a draft the next step is due at once. False where it is the caller's to do: no grant or its end, rows
        that travel inline or that nobody is there for, no draft of that name, no room for a chain.
        """
        grant = sequence.grant
        if grant is None or sequence.length >= grant.until_length:
            return False
        if not grant.draft_instance_id:
            return rows is None and _step_alone(sequence)
        extend = self._begun.get(sequence)
        if rows is None or extend is None:
            return False
        num_tokens = min(grant.num_draft_tokens, self._limits.max_draft_tokens, self._room(sequence) - 1)
        if num_tokens < 1 or not self._name(sequence, (self._links[grant.draft_instance_id], grant.link_id)):
            return False
        del self._begun[sequence]
        extend.token_ids.extend(token_ids[-rows.tensor.shape[0] :])
        extend.num_draft_tokens = num_tokens
        now = time.monotonic()
        sequence.wait = Wait(now, num_tokens, now + grant.timeout)
        self._waiting.add(sequence)
        return True

    def send(self) -> None:
        """Sends what a step handed over, in one packet a draft."""
        for link, request in self._requests.items():
            if self._begun:  # and not ended: these go no further, or not by themselves
                asked = [command for command in request.commands if command.extend.num_draft_tokens]
                request = draft_pb2.ProposeRequest(commands=asked)
            if request.commands and not link.send(request):
                link.shut_down()  # its end is read, and then nothing waits for it
        self.begin()

    def take(self, proposed: Proposed) -> None:
        """Begins the steps that a draft's answers lead to. Nothing may be waiting for one of them any more."""
        link, now = proposed.link, time.monotonic()
        for event in proposed.events:
            if (sequence := self._sequences.get((link, event.sequence_id))) is not None:
                self._take(sequence, event, now)

    def late(self, now: float) -> None:
        """Those that have waited for long enough go on without a chain."""
        late = [sequence for sequence in self._waiting if sequence.wait is not None and sequence.wait.deadline <= now]
        for sequence in late:
            self._without_chain(sequence, _Round.NO_CHAIN_LATE)

    def next_deadline(self) -> float | None:
        """When the first of those that wait has waited for long enough."""
        return min((s.wait.deadline for s in self._waiting if s.wait is not None), default=None)

    def forget(self, sequence: Sequence) -> None:
        """It has ended, or is no longer here."""
        self._waiting.discard(sequence)
        if (name := self._names.pop(sequence, None)) is not None:
            del self._sequences[name]

    def _take(self, sequence: Sequence, event: draft_pb2.DraftEvent, now: float) -> None:
        proposal, wait = event.proposal, sequence.wait
        chain = proposal.token_ids[:]
        if wait is None or (proposal.first_position != sequence.length and event.HasField("proposal")):
            sequence.num_late += len(chain)
            return
        if not chain and event.HasField("error"):
            level = logging.DEBUG if event.error.code in _GONE else logging.WARNING
            log.log(level, "%s: the draft answers: %s", sequence, event.error.message)
            self._without_chain(sequence, _Round.NO_CHAIN_LOST)
            return
        fit = self._cut(chain, wait.num_tokens)
        sequence.num_cut += len(chain) - len(fit)
        if fit:
            self._advance(sequence, PairRound(fit, event.queue_us, event.compute_us), now)
        else:
            self._without_chain(sequence, _Round.NO_CHAIN_EMPTY)

    def _name(self, sequence: Sequence, name: Name) -> bool:
        """Whether the draft's answers by that name are this sequence's: not where another one bears it."""
        if self._names.get(sequence) != name:
            if name in self._sequences:
                return False
            self.forget(sequence)
            self._names[sequence], self._sequences[name] = name, sequence
        return True

    def _room(self, sequence: Sequence) -> int:
        """How many more tokens the sequence can take."""
        room = self._limits.max_sequence_length - sequence.length
        most = sequence.open.ending.max_new_tokens
        return min(room, most - sequence.num_generated) if most else room

    def _cut(self, chain: list[int], num_tokens: int) -> list[int]:
        """What of a chain can be verified: the draft is another process, and may be wrong about anything."""
        known = self._limits.vocab_size
        if chain and max(chain) >= known:
            chain = chain[: next(place for place, token_id in enumerate(chain) if token_id >= known)]
        return chain[:num_tokens]

    def _without_chain(self, sequence: Sequence, reason: _Round.NoChain) -> None:
        """The last round of a grant."""
        sequence.grant = None
        self._advance(sequence, PairRound(no_chain=reason), time.monotonic())

    def _advance(self, sequence: Sequence, pair_round: PairRound, now: float) -> None:
        """Gives a sequence the command that its caller need not send."""
        assert sequence.wait is not None and sequence.idle_since is not None
        pair_round.waited = now - sequence.wait.asked
        if sequence.num_late or sequence.num_cut:
            pair_round.num_late, pair_round.num_cut = sequence.num_late, sequence.num_cut
            sequence.num_late = sequence.num_cut = 0
        # Not how long the answer then waited, too, for a step without it to end: groups would never become one again.
        draft_time = 1e-6 * (pair_round.draft_queue_us + pair_round.draft_compute_us) or pair_round.waited
        sequence.turnaround = sequence.wait.asked - sequence.idle_since + min(draft_time, pair_round.waited)
        sequence.wait = None
        self._waiting.discard(sequence)
        sequence.advance = Advance(*sequence.key, pair_round.draft_token_ids, None, now, pair_round)
        sequence.idle_since = None


def _step_alone(sequence: Sequence) -> bool:
    """Gives a sequence the command for a step without a chain, which its caller need not send."""
    sequence.advance = Advance(*sequence.key, [], None, time.monotonic(), PairRound())
    sequence.idle_since = None
    return True
