"""Which pair is let go on by itself, and how far: the gateway's side, without services."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.draft_session import Chain, DraftSequence
from gateway.drafting import NO_CHAIN, Drafting
from gateway.pair_grant import GRANT_TOKENS, PairGrant
from outrider.v1 import common_pb2, draft_pb2, target_pb2


class Session(SimpleNamespace):
    """What a draft's sequences need of their session."""

    def open(self, command: draft_pb2.DraftCommand.OpenDraft) -> DraftSequence:
        sequence = DraftSequence(self, 1)  # type: ignore[arg-type]
        sequence.link_id = command.link_id
        return sequence


def new_draft(name: str, timeout: float = 1.0) -> Any:
    info = {"instance_id": name, "aux_boundaries": [1], "max_draft_tokens": 5, "max_sequence_length": 1000}
    return SimpleNamespace(
        info=draft_pb2.GetDraftInfoResponse(**info),
        metrics=SimpleNamespace(requests=SimpleNamespace(inc=lambda: None)),
        runs_rounds=True,
        serving=True,
        session=Session(timeout=timeout, alive=False, sequences={}),
        transport=lambda target: common_pb2.TRANSPORT_SHARED_MEMORY,
    )


class Begun:
    """A request of three tokens that has begun with the first of two drafts."""

    def __init__(self) -> None:
        self.drafts = [new_draft("one"), new_draft("two")]
        admitted = SimpleNamespace(draft_tokens=4, draft_model="", sampling=common_pb2.SamplingParams())
        origin = SimpleNamespace(request_id="", traceparent="")
        self.request: Any = SimpleNamespace(admitted=admitted, origin=origin, tokens=[1, 2, 3], room=500)
        self.drafting = Drafting(self.request)
        aux = self.drafting.begin(SimpleNamespace(choose_draft=self._choose, info=None))  # type: ignore[arg-type]
        assert aux is not None and aux.draft_instance_id == "one"

    def _choose(self, *_: object, **__: object) -> Any:
        return next((draft for draft in self.drafts if draft.serving), None)

    def step(self, chain: list[int]) -> tuple[str | None, target_pb2.TargetCommand.GrantRounds | None]:
        """Whose rows are asked for from now on, where that changes, and what is granted beside the chain."""
        aux = self.drafting.aux_change()
        return aux.draft_instance_id if aux is not None else None, self.drafting.grant(Chain(chain), aux)


def test_a_grant_is_for_a_draft_that_has_answered() -> None:
    begun = Begun()
    assert begun.step([]) == (None, None)
    named, grant = begun.step([7])
    assert named is None and grant is not None
    assert (grant.draft_instance_id, grant.num_draft_tokens, grant.timeout_us) == ("one", 4, 1_000_000)
    assert grant.link_id and grant.until_length == 3 + GRANT_TOKENS


def test_none_is_for_a_draft_that_takes_over_from_the_one_that_answered() -> None:
    begun = Begun()
    begun.step([7])
    begun.drafts[0].serving = False
    assert begun.step([7]) == ("two", target_pb2.TargetCommand.GrantRounds()), "the first one's is revoked"
    named, grant = begun.step([7])
    assert named is None and grant is not None and grant.draft_instance_id == "two"


def test_what_was_granted_is_revoked_by_a_step_without_a_chain() -> None:
    begun = Begun()
    begun.step([7])
    assert [begun.step([]), begun.step([])] == [(None, target_pb2.TargetCommand.GrantRounds()), (None, None)]
    _, grant = begun.step([7])
    assert grant is not None and grant.draft_instance_id == "one"


def test_none_is_left_where_no_draft_is() -> None:
    begun = Begun()
    begun.step([7])
    begun.drafts[0].serving = begun.drafts[1].serving = False
    assert begun.step([7]) == ("", target_pb2.TargetCommand.GrantRounds())


@pytest.mark.parametrize(
    "seconds, microseconds", [(0.001, 1000), (4294.0, 4_294_000_000), (1e9, 2**32 - 1), (math.inf, 2**32 - 1)]
)
def test_any_time_out_fits_a_grant(seconds: float, microseconds: int) -> None:
    draft = new_draft("one", timeout=seconds)
    sequence = draft.session.open(draft_pb2.DraftCommand.OpenDraft(link_id=5))
    grant = PairGrant().next(draft, sequence, 3, 4, 100)
    assert grant is not None and grant.timeout_us == microseconds and grant.until_length == 3 + GRANT_TOKENS


@pytest.mark.parametrize("able", [True, False])
def test_without_speculation_the_target_is_let_go_on_alone_and_told_so_again_past_half_the_way(able: bool) -> None:
    begun = Begun()
    begun.request.admitted.draft_tokens = 0
    drafting = Drafting(begun.request)
    target: Any = SimpleNamespace(runs_rounds=able)
    assert drafting.begin(target) is None
    given = [drafting.grant(NO_CHAIN, drafting.aux_change())]
    half = GRANT_TOKENS // 2
    for _ in range(half + 1):
        begun.request.tokens.append(7)
        given.append(drafting.regrant())
    expected = {0: 3 + GRANT_TOKENS, half + 1: 3 + half + 1 + GRANT_TOKENS} if able else {}
    assert {place: grant for place, grant in enumerate(given) if grant is not None} == {
        place: target_pb2.TargetCommand.GrantRounds(until_length=until) for place, until in expected.items()
    }


def test_one_that_wants_a_draft_and_has_none_is_not_let_go_on_alone() -> None:
    begun = Begun()
    begun.drafts[0].serving = begun.drafts[1].serving = False
    target: Any = SimpleNamespace(runs_rounds=True, choose_draft=lambda *_, **__: None, info=None)
    drafting = Drafting(begun.request)
    drafting.begin(target)
    assert drafting.grant(NO_CHAIN, drafting.aux_change()) is None and drafting.regrant() is None
