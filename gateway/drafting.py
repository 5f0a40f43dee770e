"""A request's side of the draft: which sequence proposes for it, and what its target must emit for that."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from gateway.draft_session import Chain, DraftSequence
from gateway.metrics import SpeculationMetrics
from gateway.pair_grant import PairGrant
from gateway.pairs import Draft, Target
from gateway.request import Request
from outrider.v1 import common_pb2, draft_pb2, target_pb2

AuxRequest = target_pb2.TargetCommand.AuxRequest
Advanced = target_pb2.TargetEvent.Advanced
GrantRounds = target_pb2.TargetCommand.GrantRounds
PairRound = target_pb2.TargetEvent.PairRound
NO_CHAIN = Chain()
_NO_CHAIN = {
    PairRound.NO_CHAIN_UNSPECIFIED: "draft_empty",
    PairRound.NO_CHAIN_EMPTY: "draft_empty",
    PairRound.NO_CHAIN_LATE: "draft_late",
    PairRound.NO_CHAIN_LOST: "draft_lost",
}
_RETRY_SECONDS = 1.0  # after a draft refused a sequence


class Drafting:
    """Uses whatever draft is there: opens a sequence, in mid-request too, and goes on without one when it is lost."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._limit = request.admitted.draft_tokens
        self._target: Target | None = None
        self._draft: Draft | None = None
        self._sequence: DraftSequence | None = None
        self._announced: DraftSequence | None = None  # for which the target emits hidden states
        self._grant = PairGrant()
        self.pair_continues = False  # target and draft, or the target alone, have begun the next round by themselves
        self._counted: SpeculationMetrics | None = None  # of the draft that the request was counted for last
        self._refused: dict[Draft, float] = {}  # drafts that refused a sequence, and until when they are let be

    @property
    def draft(self) -> Draft | None:
        """The draft that proposes now."""
        return self._draft if self._sequence is not None else None

    def begin(self, target: Target) -> AuxRequest | None:
        """What the target is asked for when the request is opened on it."""
        if target is not self._target:
            self.close()
            self._target = target
        self._find_draft()
        self._announced = self._sequence
        self._grant, self.pair_continues = PairGrant(), False
        # A draft that has followed so far lacks only the row of the last token.
        return self._aux(self._sequence.next_row) if self._sequence is not None else None

    def aux_change(self) -> AuxRequest | None:
        """What the target must emit from the next step on, where that changed."""
        self._find_draft()
        if self._sequence is self._announced:
            return None
        self._announced = self._sequence
        return self._aux(first_position=0) if self._sequence is not None else AuxRequest()

    def grant(self, chain: Chain, aux: AuxRequest | None) -> GrantRounds | None:
        """Lets the pair go on by itself after a chain: a draft that has just answered in time, and is asked again.

        Where no chain is ever wanted, the target alone. Else what the target may still hold, having got it after its
        last round, is revoked.
        """
        if self._limit and (not chain.token_ids or aux is not None):
            return self._grant.revoke()
        self._grant.ended()
        return self._next_grant()

    def regrant(self) -> GrantRounds | None:
        """What the pair is told while it goes on by itself: that it may go further, or no further."""
        sequence, draft = self._sequence, self._draft
        if self._limit and (sequence is None or not sequence.open or draft is None or not draft.serving):
            return self._grant.revoke()
        return self._next_grant()

    def pair_chain(self, advanced: Advanced) -> Chain:
        """The chain of a round that the pair began by itself; empty where the draft was late or lost, or unwanted."""
        if self._limit == 0:
            return NO_CHAIN
        assert self._sequence is not None and self._draft is not None
        pair_round = advanced.pair_round
        self._sequence.took_pair_round(pair_round)
        chain = Chain(
            pair_round.draft_token_ids,
            pair_round.draft_queue_us * 1e-6,
            pair_round.draft_compute_us * 1e-6,
            pair_round.waited_us * 1e-6,
            self._draft.metrics,
        )
        return chain if chain.token_ids else self._without(_NO_CHAIN[pair_round.no_chain], chain)

    async def chain(self) -> Chain:
        """The chain to verify next; empty where the draft is absent, late or lost."""
        if self._limit == 0:
            return NO_CHAIN
        sequence = self._sequence
        if sequence is None:
            return self._without("draft_unavailable")
        longest = self._longest()
        if longest == 0:
            return NO_CHAIN
        if self._announced is not sequence:
            return self._without("draft_starting")
        chain = await sequence.chain(len(self._request.tokens))
        if chain is None:
            return self._without("draft_late" if sequence.open else "draft_lost")
        assert self._draft is not None
        chain.metrics = self._draft.metrics
        self._trim(chain, longest)
        return chain if chain.token_ids else self._without("draft_empty", chain)

    def take_prefilled(self, prefilled: target_pb2.TargetEvent.Prefilled) -> None:
        """Passes a part of the prompt on."""
        rows = prefilled.hidden_states
        if self._sequence is not None and (count := _num_rows(rows)):
            first = rows.first_position + 1
            self._sequence.extend(rows, self._request.tokens[first : first + count], 0)

    def take_advanced(self, advanced: Advanced) -> bool:
        """Passes the truth on and asks for the next chain, unless the next step is the last. Whether it did.

        Nothing is left to do where the pair goes on by itself.
        """
        self.pair_continues = advanced.continues
        if advanced.continues and self._sequence is not None:
            self._sequence.next_row = len(self._request.tokens) + len(advanced.token_ids) - 1
            return False
        if self._sequence is None or advanced.finish_reason or not _num_rows(advanced.hidden_states):
            return False
        self._sequence.extend(advanced.hidden_states, advanced.token_ids, self._longest(len(advanced.token_ids)))
        return True

    def close(self) -> None:
        """Frees the draft's sequence."""
        if self._sequence is not None:
            self._sequence.close()
            self._sequence = None

    def _find_draft(self) -> None:
        """Lets go of a sequence that was lost, and opens one where a draft is there."""
        if self._sequence is not None:
            if self._draft is not None and not self._draft.serving:
                self.close()  # it drains
            elif not self._sequence.open:
                if self._sequence.failed and self._draft is not None:
                    self._refused[self._draft] = asyncio.get_running_loop().time() + _RETRY_SECONDS
                self._sequence = None
        if self._limit == 0 or self._sequence is not None or self._target is None:
            return
        draft = self._target.choose_draft(
            self._request.admitted.draft_model, len(self._request.tokens), avoid=self._let_be()
        )
        if draft is None:
            return
        assert draft.session is not None
        if draft.metrics is not self._counted:
            draft.metrics.requests.inc()
        self._draft, self._counted = draft, draft.metrics
        command = draft_pb2.DraftCommand.OpenDraft(
            sampling=self._request.admitted.sampling,
            request_id=self._request.origin.request_id,
            traceparent=self._request.origin.traceparent,
            link_id=secrets.randbits(64) if draft.runs_rounds else 0,
        )
        self._sequence = draft.session.open(command)

    def _next_grant(self) -> GrantRounds | None:
        length = len(self._request.tokens)
        end = length + self._request.room
        if self._limit == 0:
            assert self._target is not None
            return self._grant.next_alone(self._target, length, end)
        assert self._draft is not None and self._sequence is not None
        return self._grant.next(self._draft, self._sequence, length, self._limit, end)

    def _let_be(self) -> list[Draft]:
        """Drafts that are not asked again yet."""
        if not self._refused:
            return []
        now = asyncio.get_running_loop().time()
        return [draft for draft, until in self._refused.items() if until > now]

    def _aux(self, first_position: int) -> AuxRequest:
        assert self._draft is not None and self._target is not None
        return AuxRequest(
            boundaries=self._draft.info.aux_boundaries,
            transport=self._draft.transport(self._target.info),
            draft_instance_id=self._draft.info.instance_id,
            first_position=first_position,
        )

    def _longest(self, num_new: int = 0) -> int:
        """Longest chain of use after `num_new` more tokens: the target adds one of its own, and may not pass a cap."""
        assert self._draft is not None
        info = self._draft.info
        next_position = len(self._request.tokens) + num_new
        if next_position >= info.max_sequence_length:
            return 0
        return max(0, min(self._limit, info.max_draft_tokens, self._request.room - num_new - 1))

    def _trim(self, chain: Chain, longest: int) -> None:
        """Cuts what the target would refuse: the draft is another process, and may be wrong about anything."""
        token_ids, vocab_size = chain.token_ids, self._request.model.vocab_size
        assert chain.metrics is not None
        if len(token_ids) > longest:
            chain.metrics.discard("cut", len(token_ids) - longest)
            chain.token_ids = token_ids = token_ids[:longest]
        if token_ids and max(token_ids) >= vocab_size:
            valid = next(place for place, token_id in enumerate(token_ids) if token_id >= vocab_size)
            chain.metrics.discard("invalid", len(token_ids) - valid)
            chain.token_ids = token_ids[:valid]

    def _without(self, reason: str, chain: Chain = NO_CHAIN) -> Chain:
        if self._draft is not None:
            self._draft.metrics.fallback(reason)
        else:
            self._request.metrics.draft_unavailable()
        return chain


def _num_rows(rows: common_pb2.HiddenStates) -> int:
    shape: Sequence[int] = rows.tensor.shape
    return shape[0] if shape else 0
