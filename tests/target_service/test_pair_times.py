"""How long a draft took, as a target's pair rounds know it: without services, since the clock is set."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from outrider.durations import LONGEST_US
from outrider.v1 import common_pb2, draft_pb2, target_pb2
from target_service.commands import Advanced, AuxRequest, Grant, Proposed, Rows, Stats, Timing
from target_service.encoding import verify_response
from target_service.pair_rounds import PairRounds
from target_service.sequence import Sequence
from tests.target_service.builders import LIMITS, make_open

PairRound = target_pb2.TargetEvent.PairRound


def handed_over() -> tuple[PairRounds, Mock, Sequence]:
    """A sequence whose draft, behind the link, was just asked."""
    pairs, aux = PairRounds(LIMITS), AuxRequest((1,), common_pb2.TRANSPORT_SHARED_MEMORY, "draft-1")
    link = Mock(draft_instance_id="draft-1", ended=False)
    pairs.link(link)
    sequence = Sequence.of(replace(make_open(1, 10), aux=aux), 1)
    sequence.grant = Grant(None, 1, "draft-1", 77, 20, 3, LONGEST_US * 1e-6)
    sequence.idle_since = 0.0
    rows = Rows(8, common_pb2.Tensor(shape=[1, 4]))
    pairs.prepare(sequence, rows)
    assert pairs.hand_over(sequence, rows, [5])
    return pairs, link, sequence


def test_a_draft_that_is_later_than_a_message_can_say_is_late_all_the_same(monkeypatch) -> None:
    pairs, _, sequence = handed_over()
    now = pairs.next_deadline() + 1
    monkeypatch.setattr("time.monotonic", lambda: now)
    pairs.late(now)
    advanced = Advanced(1, [5], 0, None, [], 0, Timing(), pair_round=sequence.advance.pair_round)
    (event,) = verify_response(([advanced], Stats())).events
    assert event.advanced.pair_round == PairRound(no_chain=PairRound.NO_CHAIN_LATE, waited_us=LONGEST_US)
    assert pairs.next_deadline() is None and sequence.wait is None


def test_a_draft_takes_as_long_as_it_says_however_late_its_answer_is_read(monkeypatch) -> None:
    pairs, link, sequence = handed_over()
    asked = sequence.idle_since = sequence.wait.asked - 0.5
    monkeypatch.setattr("time.monotonic", lambda: asked + 10)  # a long step without this sequence was made meanwhile
    proposal = draft_pb2.DraftEvent.Proposal(token_ids=[1, 2], first_position=sequence.length)
    event = draft_pb2.DraftEvent(sequence_id=77, proposal=proposal, queue_us=1_000_000, compute_us=2_000_000)
    pairs.take(Proposed(link, [event]))
    assert sequence.turnaround == pytest.approx(3.5) and sequence.advance.pair_round.waited == pytest.approx(9.5)
