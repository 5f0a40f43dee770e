"""The rounds that an engine runs while it waits: each through all of its code, and none with a trace."""

from unittest.mock import patch

from draft_service import pair_link
from draft_service.rehearsal import Rehearsal
from draft_service.static_steps import StaticSteps
from outrider.v1 import draft_pb2


def test_a_rehearsal_is_a_whole_round_and_the_same_every_time():
    rehearsal = Rehearsal()
    with (
        patch.object(pair_link, "read_together", wraps=pair_link.read_together) as read,
        patch.object(StaticSteps, "run", autospec=True, side_effect=StaticSteps.run) as run,
    ):
        answers = [draft_pb2.ProposeResponse.FromString(rehearsal()) for _ in range(200)]
    assert read.call_count == run.call_count == 200
    chains = [[(e.sequence_id, *e.proposal.token_ids, e.proposal.first_position) for e in a.events] for a in answers]
    assert chains[0] == [(number, 0, 0, 0, 7) for number in range(1, 9)]
    assert all(chain == chains[0] for chain in chains)
    engine = rehearsal._engine
    assert not engine._waiting and engine._proposer.cache.allocator.num_free == 0  # a page each, and no more
