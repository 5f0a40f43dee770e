"""Synthetic acceptance: its mean, and that it is a function of seed and position."""

from itertools import pairwise

import numpy as np
import pytest

from kernels.noise import philox_words
from kernels.scripted_acceptance import COUNTER, NOTHING, Script

POSITIONS = range(100, 4100)


def mean_length(script, chain, seed=7):
    """Tokens a round, the target's own included."""
    return 1 + sum(script.num_accepted(seed, position, chain) for position in POSITIONS) / len(POSITIONS)


@pytest.mark.parametrize(
    ("length", "chain", "expected"),
    [(1.0, 3, 1.0), (2.5, 3, 2.5), (3.0, 5, 3.0), (2.3, 1, 2.0), (4.0, 3, 4.0), (9.5, 7, 8.0), (2.5, 0, 1.0)],
)
def test_the_mean_is_the_scripts_and_never_more_than_the_chain(length, chain, expected):
    assert mean_length(Script(length), chain) == pytest.approx(expected, abs=0.03)


def test_the_chance_is_a_word_of_philox():
    script = Script(2.25)
    words = [philox_words(11, position, np.array([COUNTER]))[0, 0] for position in POSITIONS]
    assert [script.num_accepted(11, position, 3) - 1 for position in POSITIONS] == [word < 2**30 for word in words]


def test_a_chain_differs_by_at_most_one_from_another():
    script = Script(2.5)
    assert {script.num_accepted(1, position, 7) for position in POSITIONS} == {1, 2}


def test_it_is_a_function_of_seed_and_position():
    script = Script(1.5)
    one, again, other = (
        [script.num_accepted(seed, position, 3) for position in POSITIONS] for seed in (2**64 - 3, 2**64 - 3, 5)
    )
    assert one == again
    agreement = sum(a == b for a, b in zip(one, other, strict=True)) / len(POSITIONS)
    assert agreement == pytest.approx(0.5, abs=0.05)
    # Neighbours do not agree more often, either.
    assert sum(a == b for a, b in pairwise(one)) / len(POSITIONS) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("length", [0.5, float("nan")])
def test_less_than_the_targets_own_token_is_refused(length):
    with pytest.raises(ValueError, match="expected at least 1"):
        Script(length)


def test_rows_choose_what_was_drafted_up_to_the_number_accepted():
    # The second draft token was the target's choice, too: the script alone decides.
    found = Script(2.0).rewrite([1, 6, 3], [5, 6, 7, 8], seed=0, position=0)
    assert found == ([1, NOTHING, NOTHING], [1, 6, 7, 8])
