"""A proposal depends on the tokens and states of its sequence, to the bit, and not on how they arrived."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.choice import ProposalSampling
from draft_service.sequence import DraftSequence, Extend, take_rows
from tests.draft_service.drivers import GREEDY, extend, load_proposer, new_sequence, random_rows, turn
from tests.drafts import write_tiny_draft

SAMPLED = ProposalSampling(temperature=0.8, seed=11)
NORMS = {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}
# Well past a page of 64 positions.
LENGTH = 150


DEEP = {"num_hidden_layers": 3, "qk_norm": True, "layout": "A''"}
NO_AUX = {"eagle_config": {"use_aux_hidden_state": False}}
KINDS = {
    "bfloat16": ({}, torch.bfloat16, None),
    "norms": (NORMS, torch.float32, None),
    "deep, window": (DEEP, torch.bfloat16, 20),
    "no aux, window": (NO_AUX, torch.float32, 70),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def proposer(request, tmp_path_factory):
    flags, dtype, window = request.param
    directory = write_tiny_draft(tmp_path_factory.mktemp("draft"), embed=True, **flags)
    return load_proposer(directory, dtype=dtype, window=window)


def rows_for(proposer, count, seed=0):
    return random_rows(count, proposer.model.draft.input_width, seed)


def fresh(proposer, states, tokens, first=0, wanted=5, sampling=GREEDY):
    """What a sequence that gets everything at once proposes: tokens and probabilities."""
    sequence = new_sequence(sampling)
    chain = extend(proposer, sequence, first, states, tokens, wanted)
    proposer.cache.release(sequence)
    return chain


def test_any_chunking_gives_the_same_chain(proposer):
    states, tokens = rows_for(proposer, LENGTH)
    whole = fresh(proposer, states, tokens)
    for seed in range(6):
        cuts = sorted(random.Random(seed).sample(range(1, LENGTH), 1 + 3 * seed))
        sequence = new_sequence()
        for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            # Chains drafted between chunks leave keys that the next chunk overwrites.
            wanted = 5 if end == LENGTH else seed % 4
            chain = extend(proposer, sequence, begin, states[begin:end], tokens[begin:end], wanted)
        assert chain == whole
        proposer.cache.release(sequence)


@pytest.mark.parametrize("accepted", range(6))
def test_after_a_rejection_at_any_place_the_next_chain_is_that_of_a_fresh_draft(proposer, accepted):
    states, tokens = rows_for(proposer, LENGTH)
    sequence = new_sequence()
    end = 60  # the rounds cross the edge of a page
    extend(proposer, sequence, 0, states[:end], tokens[:end], 5)
    while end + accepted + 1 < 80:
        begin, end = end, end + accepted + 1
        chain = extend(proposer, sequence, begin, states[begin:end], tokens[begin:end], 5)
        assert chain == fresh(proposer, states[:end], tokens[:end])
    # And a round that takes rows back: the last ones come again with other tokens.
    again = [(token + 1) % 320 for token in tokens[end - 3 : end]]
    chain = extend(proposer, sequence, end - 3, states[end - 3 : end], again, 5)
    assert chain == fresh(proposer, states[:end], tokens[: end - 3] + again)
    proposer.cache.release(sequence)


def test_a_chain_step_equals_a_row_whose_state_is_what_was_fed_back(proposer):
    states, tokens = rows_for(proposer, 30)
    whole = fresh(proposer, states, tokens, wanted=6)
    assert fresh(proposer, states, tokens, wanted=3).token_ids == whole.token_ids[:3]


def test_batch_mates_change_nothing(proposer):
    lengths, wanted = (3, 70, 1, 129, 40), (5, 0, 1, 3, 7)
    samplings = (GREEDY, GREEDY, SAMPLED, SAMPLED, ProposalSampling(temperature=1.0))
    rows = [rows_for(proposer, length, seed=index) for index, length in enumerate(lengths)]
    alone = [
        fresh(proposer, *row, wanted=count, sampling=sampling)
        for row, count, sampling in zip(rows, wanted, samplings, strict=True)
    ]
    for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (3, 1), (2, 0)):
        sequences = [new_sequence(samplings[index]) for index in order]
        turns = [
            turn(proposer, sequence, 0, *rows[index], wanted[index])
            for sequence, index in zip(sequences, order, strict=True)
        ]
        assert proposer.step(turns) == [alone[index] for index in order]
        for sequence in sequences:
            proposer.cache.release(sequence)


def test_beyond_a_gap_it_starts_anew_at_its_absolute_positions(proposer):
    states, tokens = rows_for(proposer, LENGTH)
    sequence = new_sequence()
    extend(proposer, sequence, 0, states[:20], tokens[:20], 3)
    chain = extend(proposer, sequence, 100, states[100:], tokens[100:], 5)
    assert (sequence.start, sequence.end) == (100, LENGTH)
    assert chain == fresh(proposer, states[100:], tokens[100:], first=100)
    # Only the page of positions 64 to 127 and the one after it.
    assert len(sequence.pages) == 2
    # Back before its start: anew again.
    chain = extend(proposer, sequence, 10, states[10:50], tokens[10:50], 5)
    assert chain == fresh(proposer, states[10:50], tokens[10:50], first=10)
    proposer.cache.release(sequence)
    assert proposer.cache.allocator.usage == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.integers(1, 40),
)
def test_rows_taken_in_are_those_of_a_naive_record(pieces, together, limit):
    """However extends overlap, and in whichever groups they are taken in, the cache ends up with the right rows."""
    sequence = DraftSequence(None, 0, GREEDY)
    cache: dict[int, int] = {}  # position to the row that was computed last
    record: dict[int, int] = {}  # what the contract says is held
    serial, group = 0, []
    for index, (first, count) in enumerate(pieces):
        rows = torch.arange(serial, serial + count)
        serial += count
        group.append(Extend(sequence, first, rows[:, None].float(), rows.tolist(), 0, 0.0, 0.0))
        held = record.keys()
        if not held or not min(held) <= first <= max(held) + 1:
            record = {}
        record = {position: row for position, row in record.items() if position < first}
        record |= {first + i: int(row) for i, row in enumerate(rows) if first + i < limit}
        if together[index % len(together)] and index < len(pieces) - 1:
            continue
        taken = take_rows(sequence, group, limit)
        ids = [int(token) for _, tokens in taken.pieces for token in tokens]
        assert [int(state) for states, _ in taken.pieces for state in states[:, 0]] == ids and len(ids) == taken.count
        cache |= {taken.first_position + i: row for i, row in enumerate(ids)}
        group = []
    assert {position: cache[position] for position in range(sequence.start, sequence.end)} == record
