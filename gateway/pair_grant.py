"""How far a request's target and draft, or its target alone, may go in rounds that the gateway only hears of."""

from __future__ import annotations

from gateway.draft_session import DraftSequence
from gateway.pairs import Draft, Target
from outrider.durations import microseconds
from outrider.v1 import target_pb2

GrantRounds = target_pb2.TargetCommand.GrantRounds
# What the pair may add to a request before it needs a new grant, which it gets long before it has: a gateway that
# stands still stops it.
GRANT_TOKENS = 64


class PairGrant:
    """The grant of one sequence on one target."""

    def __init__(self) -> None:
        self._until = 0

    def next(
        self, draft: Draft, sequence: DraftSequence, length: int, num_draft_tokens: int, end: int
    ) -> GrantRounds | None:
        """A grant for a sequence of `length` tokens that ends at `end` at the latest; None while an earlier will do."""
        if not draft.runs_rounds or not sequence.link_id:
            return None
        if not self._extend(length, min(end, draft.info.max_sequence_length)):
            return None
        return GrantRounds(
            draft_instance_id=draft.info.instance_id,
            link_id=sequence.link_id,
            until_length=self._until,
            num_draft_tokens=min(num_draft_tokens, draft.info.max_draft_tokens),
            timeout_us=microseconds(sequence.session.timeout),
        )

    def next_alone(self, target: Target, length: int, end: int) -> GrantRounds | None:
        """The same for steps without a chain, which the target makes by itself."""
        if not target.runs_rounds or not self._extend(length, end):
            return None
        return GrantRounds(until_length=self._until)

    def revoke(self) -> GrantRounds | None:
        """Ends the grant with the round under way; None where that was said before."""
        if not self._until:
            return None
        self._until = 0
        return GrantRounds()

    def ended(self) -> None:
        """It is to be given anew."""
        self._until = 0

    def _extend(self, length: int, end: int) -> bool:
        """Moves the grant's end on, `end` at the latest; False where more than half of it is left."""
        until = min(length + GRANT_TOKENS, end)
        if self._until >= min(length + GRANT_TOKENS // 2, until):
            return False
        self._until = until
        return True
