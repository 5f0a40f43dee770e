"""Steps through static tensors, as they are captured on CUDA: the chains of ordinary steps."""

import pytest
import torch

from draft_service.choice import ProposalSampling
from draft_service.proposer import Turn
from draft_service.sequence import Part
from draft_service.static_steps import split
from kernels.graphs import Graphs
from tests.draft_service.drivers import load_proposer, new_sequence, turn
from tests.drafts import draft_tensors, tiny_config, write_tiny_draft

SHARED = {"embed_tokens.weight": draft_tensors(tiny_config(), 0)["embed_tokens.weight"]}
SAMPLINGS = [
    ProposalSampling(temperature=0.0),
    ProposalSampling(temperature=0.7, seed=2**64 - 3),
    ProposalSampling(temperature=1.0),
]


def rounds(proposer, numbers, tokens=3, context=11):
    """The chains of rounds with so many sequences each, of five, which take in one to `tokens` + 1 rows a round."""
    random = torch.Generator().manual_seed(1)
    width = proposer.model.draft.input_width
    sequences = [new_sequence(SAMPLINGS[index % 3]) for index in range(max(numbers))]

    def part(sequence, rows, wanted) -> Turn:
        states = torch.randn(rows, width, generator=random)
        ids = torch.randint(320, (rows,), generator=random).tolist()
        # Of the last chain some tokens were accepted: true states replace what it wrote.
        return turn(proposer, sequence, sequence.end, states, ids, wanted)

    for index, sequence in enumerate(sequences):
        proposer.step([part(sequence, context + 17 * index, 0)])
    chains = []
    for number, count in enumerate(numbers):
        turns = [
            part(sequences[(number + i) % len(sequences)], 1 + (number + i) % (tokens + 1), tokens)
            for i in range(count)
        ]
        assert split(turns) == ([turns], [])
        chains.append(proposer.step(turns))
    return chains


def together(turns):
    """The turns with their states as a packet brings them: parts of one tensor, with rows of nobody between them."""
    pieces = [(one.rows, *one.rows.pieces[0]) for one in turns]
    whole = torch.cat([torch.cat([states, torch.full_like(states[:1], 1e9)]) for _, states, _ in pieces])
    first = 0
    for rows, states, ids in pieces:
        rows.pieces = [(Part(whole, first, len(states)), ids)]
        first += len(states) + 1
    return turns


@pytest.mark.parametrize("num_sequences", [2, 5, 40])
def test_rows_that_came_together_are_those_that_came_one_by_one(tmp_path, num_sequences):
    write_tiny_draft(tmp_path)
    sizes = [1 + index % 4 * 2 for index in range(num_sequences)]

    def chains(graphs, bring):
        proposer, random = load_proposer(tmp_path, SHARED, graphs=graphs), torch.manual_seed(0)
        states = [torch.randn(size, 192, generator=random) for size in sizes]
        turns = [turn(proposer, new_sequence(SAMPLINGS[0]), 0, rows, [7] * len(rows), 2) for rows in states]
        return proposer.step(bring(turns))

    expected = chains(None, list)
    assert chains(Graphs(torch.device("cpu")), together) == chains(None, together) == expected


@pytest.mark.parametrize(
    "settings", [{}, {"layout": "A''", "num_hidden_layers": 2}, {"draft_vocab_size": 320}, {"norm_output": True}]
)
def test_chains_are_those_of_ordinary_steps(tmp_path, settings):
    write_tiny_draft(tmp_path, **settings)
    graphs = Graphs(torch.device("cpu"))
    numbers = (1, 1, 3, 5, 9, 2, 1)
    found = rounds(load_proposer(tmp_path, SHARED, graphs=graphs), numbers)
    assert found == rounds(load_proposer(tmp_path, SHARED), numbers)
    assert {shape.sequences for shape in graphs._steps} == {1, 2, 3, 5, 16}
    assert max(shape.rows for shape in graphs._steps) > 8


def test_warming_up_leaves_no_trace(tmp_path):
    write_tiny_draft(tmp_path)
    warm = load_proposer(tmp_path, SHARED, graphs=Graphs(torch.device("cpu")))
    warm.warm_up()
    assert warm.cache.allocator.usage == 0
    assert rounds(warm, (2, 1)) == rounds(load_proposer(tmp_path, SHARED), (2, 1))


def test_what_does_not_fit(tmp_path):
    proposer = load_proposer(write_tiny_draft(tmp_path), SHARED, pages=80)

    def one(rows, wanted, sampling=SAMPLINGS[0]):
        return turn(proposer, new_sequence(sampling), 0, torch.zeros(rows, 192), [0] * rows, wanted)

    bias = torch.tensor([3]), torch.tensor([1.0])
    fitting = [one(1, 3), one(2, 2), one(4, 3)]
    others = [one(3, 0), one(300, 3), one(1, 3, ProposalSampling(bias=bias))]
    assert split([*fitting, *others]) == ([[fitting[0], fitting[2]], [fitting[1]]], others)
    many = [one(1, 1) for _ in range(65)]
    assert split(many) == ([], many)


def test_groups_of_one_step(tmp_path):
    """Chains of different lengths, a prompt and a bias in one step."""
    write_tiny_draft(tmp_path)

    def step(graphs=None):
        proposer = load_proposer(tmp_path, SHARED, graphs=graphs)
        random = torch.Generator().manual_seed(1)
        bias = ProposalSampling(temperature=0.0, bias=(torch.tensor([3]), torch.tensor([50.0])))
        turns = [
            turn(proposer, new_sequence(sampling), 0, torch.randn(rows, 192, generator=random), [5] * rows, wanted)
            for rows, wanted, sampling in [
                (2, 3, SAMPLINGS[0]),
                (40, 0, SAMPLINGS[0]),
                (3, 1, SAMPLINGS[1]),
                (1, 3, SAMPLINGS[2]),
                (2, 2, bias),
                (4, 1, SAMPLINGS[0]),
            ]
        ]
        return proposer.step(turns)

    graphs = Graphs(torch.device("cpu"))
    assert step(graphs) == step()
    assert {(shape.sequences, shape.tokens) for shape in graphs._steps} == {(2, 3), (2, 1)}
