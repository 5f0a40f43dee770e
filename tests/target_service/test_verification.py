import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED
from target_service.verification import EndingRules, Verdict, verify_chain

TOKENS = st.integers(0, 3)


@st.composite
def verifications(draw):
    """A chain, the target's choices, the rules and the sequence's state, close to every ending at once."""
    draft = draw(st.lists(TOKENS, max_size=7))
    chosen = [draw(st.just(token) | TOKENS) for token in draft] + [draw(TOKENS)]
    num_generated = draw(st.integers(0, 5))
    length = num_generated + draw(st.integers(1, 4))
    min_new = draw(st.integers(0, 10))
    rules = EndingRules.of(
        eos_token_ids=draw(st.lists(TOKENS, max_size=1)),
        stop_token_ids=draw(st.lists(TOKENS, max_size=1)),
        ignore_eos=draw(st.booleans()),
        min_new_tokens=min_new,
        max_new_tokens=draw(st.just(0) | st.integers(max(min_new, num_generated + 1), 14)),
        max_sequence_length=length + draw(st.integers(1, 9)),
    )
    return draft, chosen, rules, num_generated, length


def one_at_a_time(draft, chosen, rules, num_generated, length):
    """The tokens that plain decoding emits as long as the chain knows the next one, ending rules spelled out."""
    emitted, reason = [], FINISH_REASON_UNSPECIFIED
    while True:
        index = len(emitted)
        token = chosen[index]
        emitted.append(token)
        if token in rules.ending_token_ids and num_generated + index >= rules.min_new_tokens:
            reason = FINISH_REASON_STOP
        elif num_generated + len(emitted) == (rules.max_new_tokens or math.inf) or (
            length + len(emitted) == rules.max_sequence_length
        ):
            reason = FINISH_REASON_LENGTH
        if reason != FINISH_REASON_UNSPECIFIED or emitted != list(draft[: len(emitted)]):
            break
    num_accepted = 0
    while num_accepted < len(emitted) and emitted[: num_accepted + 1] == list(draft[: num_accepted + 1]):
        num_accepted += 1
    return Verdict(emitted, num_accepted, reason)


@given(verifications())
def test_verdict_equals_plain_decoding(case):
    draft, chosen, rules, num_generated, length = case
    verdict = verify_chain(draft, chosen, rules, num_generated=num_generated, length=length)
    assert verdict == one_at_a_time(*case)
    if verdict.finish_reason == FINISH_REASON_UNSPECIFIED:
        assert verdict.num_accepted == len(verdict.token_ids) - 1
    else:
        assert len(verdict.token_ids) - verdict.num_accepted in (0, 1)


RULES = EndingRules(frozenset({9}), max_sequence_length=100)


@pytest.mark.parametrize(
    ("draft", "chosen", "expected"),
    [
        ([], [5], Verdict([5], 0, FINISH_REASON_UNSPECIFIED)),
        ([1, 2, 3], [1, 2, 3, 4], Verdict([1, 2, 3, 4], 3, FINISH_REASON_UNSPECIFIED)),
        ([1, 2, 3], [7, 2, 3, 4], Verdict([7], 0, FINISH_REASON_UNSPECIFIED)),
        ([1, 2, 3], [1, 7, 3, 4], Verdict([1, 7], 1, FINISH_REASON_UNSPECIFIED)),
        ([1, 9, 3], [1, 9, 3, 4], Verdict([1, 9], 2, FINISH_REASON_STOP)),  # the end token was drafted
        ([1, 2, 3], [1, 9, 3, 4], Verdict([1, 9], 1, FINISH_REASON_STOP)),  # it was not
        ([1, 2, 3], [1, 2, 3, 9], Verdict([1, 2, 3, 9], 3, FINISH_REASON_STOP)),
    ],
)
def test_acceptance_and_ends_inside_the_chain(draft, chosen, expected):
    assert verify_chain(draft, chosen, RULES, num_generated=0, length=10) == expected


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("cap", ["max_new_tokens", "max_sequence_length"])
def test_caps_end_at_every_place(room, cap):
    caps = {"max_new_tokens": 0, "max_sequence_length": 100} | {cap: (20 if cap == "max_new_tokens" else 30) + room}
    rules = EndingRules(frozenset(), min_new_tokens=50, **caps)
    verdict = verify_chain([1, 2, 3], [1, 2, 3, 4], rules, num_generated=20, length=30)
    assert verdict.token_ids == [1, 2, 3, 4][:room]
    assert verdict.num_accepted == min(room, 3)
    assert verdict.finish_reason == (FINISH_REASON_LENGTH if room <= 4 else FINISH_REASON_UNSPECIFIED)


def test_an_end_token_at_the_cap_is_a_stop():
    rules = EndingRules(frozenset({9}), max_sequence_length=100, max_new_tokens=1)
    assert verify_chain([], [9], rules, num_generated=0, length=1).finish_reason == FINISH_REASON_STOP


def test_min_new_tokens_counts_from_token_zero():
    rules = EndingRules(frozenset({9}), max_sequence_length=100, min_new_tokens=2)
    verdict = verify_chain([9, 9, 9], [9, 9, 9, 9], rules, num_generated=0, length=1)
    assert verdict == Verdict([9, 9, 9], 3, FINISH_REASON_STOP)


def test_ignored_end_tokens_are_ordinary():
    rules = EndingRules.of(
        eos_token_ids=[9],
        stop_token_ids=[8],
        ignore_eos=True,
        min_new_tokens=0,
        max_new_tokens=0,
        max_sequence_length=100,
    )
    assert verify_chain([9], [9, 8], rules, num_generated=0, length=1) == Verdict([9, 8], 1, FINISH_REASON_STOP)


def test_only_a_row_that_is_reached_needs_a_choice():
    assert verify_chain([1, 2], [5, -1, -1], RULES, num_generated=0, length=3).token_ids == [5]
    with pytest.raises(ValueError, match="position 4"):
        verify_chain([1, 2], [1, -1, 3], RULES, num_generated=0, length=3)


def test_rows_must_fit_the_chain():
    with pytest.raises(ValueError, match="chosen_token_ids: expected 3"):
        verify_chain([1, 2], [1, 2], RULES, num_generated=0, length=3)
