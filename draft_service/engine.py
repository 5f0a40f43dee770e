"""The draft's engine: gathers what waits, runs a step, hands the answers over. Runs in one thread, knows no RPC."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

from draft_service.commands import Answer, Ask, Barrier, Close, Command, Open
from draft_service.metrics import DraftMetrics
from draft_service.pair_link import PairLink
from draft_service.proposer import Chain, Proposer, Turn
from draft_service.sequence import DraftSequence, Extend, take_rows
from kernels.transfer import wait
from outrider.durations import microseconds
from outrider.errors import Cancelled
from outrider.v1 import draft_pb2

# A step waits for sequences whose rows are on their way, at most this share of the last step's time.
WAIT_SHARE = 0.15
# Rows of prompts in one step, and how many rows of one sequence are a prompt's rather than a round's.
INTAKE_ROWS = 1024
SHORT_ROWS = 64


class Outgoing(NamedTuple):
    """Answers to one target, in a message that is complete but for their chains, or to gateways."""

    link: PairLink | None
    answers: list[Answer]
    begun: draft_pb2.ProposeResponse | None


class DraftEngine:
    """Drives a Proposer. `deliver` takes the answers of a step, in order within each sequence."""

    def __init__(
        self,
        proposer: Proposer,
        deliver: Callable[[list[Answer]], None],
        metrics: DraftMetrics,
    ) -> None:
        self._proposer = proposer
        self._deliver = deliver
        self.sequences: set[DraftSequence] = set()
        # Those that the target may ask for itself, by their link_id.
        self._linked: dict[int, DraftSequence] = {}
        self._waiting: dict[DraftSequence, list[Extend]] = {}
        # When sequences were answered whose next rows have not come yet.
        self._answered: dict[DraftSequence, float] = {}
        self._last_step = 0.0
        self._in_step: list[DraftSequence] = []
        self._report_to(metrics)

    def apply(self, batches: list[list[Command]]) -> None:
        """Takes commands in, in order. Those of one message come together, so that a step sees all or none."""
        for command in itertools.chain.from_iterable(batches):
            if isinstance(command, Extend):
                self._extend(command)
            elif isinstance(command, Ask):
                if extend := command.link.read_extend(command, self._linked.get(command.message.sequence_id)):
                    self._extend(extend)
            elif isinstance(command, Open):
                self._open(command.sequence)
            elif isinstance(command, Close):
                self._close(command.sequence)
            elif isinstance(command, Barrier):
                wait(self._proposer.model.device)
                command.passed()
            else:
                self._proposer = command.proposer
                self._last_step = 0.0
                self._report_to(command.metrics)

    def idle_seconds(self) -> float | None:
        """Until a command arrives when nothing waits; else as long as others are worth waiting for."""
        if not self._waiting:
            return None
        return max(0.0, self._wait_until() - time.perf_counter())

    def step(self) -> None:
        """Takes the rows in that wait and proposes the chains that are wanted."""
        if not self._waiting or time.perf_counter() < self._wait_until():
            return
        taken = self._take_waiting()
        self._in_step = [extends[0].sequence for extends in taken]
        started = time.perf_counter()
        try:
            turns = [turn for extends in taken if (turn := self._turn(extends))]
            finish = self._proposer.queue(turns) if turns else list
            outgoing = _by_link(_answers(taken, started))  # while the device computes
            chains = finish()
            self._last_step = time.perf_counter() - started
            self._answer(outgoing, dict(zip([turn.sequence for turn in turns], chains, strict=True)))
        finally:
            for extends in taken:
                _release(extends)
        self._metrics.step(self._last_step, itertools.chain.from_iterable(taken), turns, chains)

    def on_failure(self, error: Exception) -> None:
        """Ends the sequences of the step that raised."""
        failed = [sequence for sequence in self._in_step if not sequence.closed]
        for sequence in failed:
            self._close(sequence)
            if sequence.link is not None:
                sequence.link.refuse(sequence.link_id, error)
        self._deliver([Answer(sequence, Chain([], []), 0, error=error) for sequence in failed])

    def _report_to(self, metrics: DraftMetrics) -> None:
        """Gauges are asked for when somebody looks: a round has no time for it."""
        self._metrics = metrics
        metrics.sequences.set_function(lambda: len(self.sequences))
        metrics.waiting.set_function(lambda: len(self._waiting))
        metrics.cache_usage.set_function(lambda: self._proposer.cache.allocator.usage)

    def _open(self, sequence: DraftSequence) -> None:
        self.sequences.add(sequence)
        if sequence.link_id:
            self._linked.setdefault(sequence.link_id, sequence)

    def _extend(self, extend: Extend) -> None:
        if extend.sequence.closed:
            _release([extend])
            return
        extend.sequence.link = extend.link
        waiting = self._waiting.setdefault(extend.sequence, [])
        if waiting and waiting[-1].num_draft_tokens:
            # What it would propose is stale already: only its rows are taken in.
            waiting[-1].num_draft_tokens = 0
            position, link = waiting[-1].proposal_position, waiting[-1].link
            self._hand_out(_by_link([Answer(extend.sequence, Chain([], []), position, link=link)]))
        waiting.append(extend)
        answered = self._answered.pop(extend.sequence, None)
        if answered is not None:
            extend.sequence.turnaround = extend.arrived - answered

    def _close(self, sequence: DraftSequence) -> None:
        """Frees everything of a sequence; closing twice does nothing."""
        sequence.closed = True
        self.sequences.discard(sequence)
        if self._linked.get(sequence.link_id) is sequence:
            del self._linked[sequence.link_id]
        self._answered.pop(sequence, None)
        waiting = self._waiting.pop(sequence, [])
        _release(waiting)
        if waiting and (link := waiting[-1].link) is not None:
            link.refuse(sequence.link_id, Cancelled("the sequence was closed"))
        self._proposer.cache.release(sequence)

    def _wait_until(self) -> float:
        """When the step may start: later only for sequences that, by their last turn's time, will be here by then."""
        wait = WAIT_SHARE * self._last_step
        deadline = min(extends[0].arrived for extends in self._waiting.values()) + wait
        overdue = time.perf_counter() - wait
        expected = (answered + sequence.turnaround for sequence, answered in self._answered.items())
        return deadline if any(overdue <= arrival <= deadline for arrival in expected) else 0.0

    def _take_waiting(self) -> list[list[Extend]]:
        """What of the waiting commands goes into this step, by sequence.

        Short chains' rows all do. Long intakes share INTAKE_ROWS, so that a prompt does not hold up the others.
        """
        taken, room = [], INTAKE_ROWS
        for sequence, extends in list(self._waiting.items()):
            part = extends
            if not extends[-1].num_draft_tokens or _num_rows(extends) > SHORT_ROWS:
                part = _that_fit(extends, room, at_least_one=room == INTAKE_ROWS)
                room -= _num_rows(part)
            if part:
                taken.append(part)
            if len(part) == len(extends):
                del self._waiting[sequence]
            else:
                self._waiting[sequence] = extends[len(part) :]
        return taken

    def _turn(self, extends: list[Extend]) -> Turn | None:
        """A sequence's part in the step; None where there is nothing to compute."""
        sequence, last = extends[0].sequence, extends[-1]
        if sequence.start < sequence.end < extends[0].first_position:
            self._metrics.gaps.inc()
        limits = self._proposer.limits
        rows = take_rows(sequence, extends, limits.max_sequence_length)
        room = limits.max_sequence_length - last.proposal_position
        num_tokens = max(0, min(last.num_draft_tokens, limits.max_draft_tokens, room))
        sequence.last_used = time.monotonic()
        if not rows.count or not self._make_room(sequence, sequence.end + max(0, num_tokens - 1)):
            return None
        return Turn(sequence, rows, num_tokens, last.min_confidence)

    def _make_room(self, sequence: DraftSequence, end: int) -> bool:
        """Reserves pages, at the cost of idle sequences' caches; without enough of those it loses its own."""
        cache = self._proposer.cache
        while not cache.reserve(sequence, end):
            self._metrics.cache_losses.inc()
            if cache.make_room(self.sequences, self._in_step) is None:
                cache.forget(sequence)
                return False
        return True

    def _answer(self, outgoing: list[Outgoing], chains: dict[DraftSequence, Chain]) -> None:
        """Hands the chains of a step out."""
        compute_us, now = microseconds(self._last_step), time.perf_counter()
        answers = [answer for group in outgoing for answer in group.answers]
        for answer in answers:
            answer.chain, answer.compute_us = chains.get(answer.sequence, answer.chain), compute_us
        self._in_step = []
        self._hand_out(outgoing)
        for answer in answers:
            self._answered[answer.sequence] = now

    def _hand_out(self, outgoing: list[Outgoing]) -> None:
        """To whoever asked: the target through its link, a gateway through its session."""
        for link, answers, begun in outgoing:
            if link is not None and begun is not None:
                link.answer(answers, begun)
            else:
                self._deliver(answers)


def _answers(taken: list[list[Extend]], started: float) -> list[Answer]:
    """For each sequence whose last command asked for a chain: all but the chain."""
    answers = []
    for last in (extends[-1] for extends in taken if extends[-1].num_draft_tokens):
        queue_us = microseconds(started - last.arrived)
        answers.append(Answer(last.sequence, Chain([], []), last.proposal_position, queue_us, link=last.link))
    return answers


def _by_link(answers: list[Answer]) -> list[Outgoing]:
    """The answers by who asked, and the messages to targets begun."""
    groups: dict[PairLink | None, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.link, []).append(answer)
    return [Outgoing(link, group, link.begin(group) if link else None) for link, group in groups.items()]


def _num_rows(extends: list[Extend]) -> int:
    return sum([len(extend.token_ids) for extend in extends])


def _that_fit(extends: list[Extend], room: int, at_least_one: bool) -> list[Extend]:
    """The first of the commands, as many as have `room` rows together."""
    part: list[Extend] = []
    for extend in extends:
        room -= len(extend.token_ids)
        if room < 0 and not (at_least_one and not part):
            break
        part.append(extend)
    return part


def _release(extends: list[Extend]) -> None:
    for extend in extends:
        if extend.on_read is not None:
            extend.on_read()
            extend.on_read = None
