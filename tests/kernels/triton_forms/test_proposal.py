"""The draft on the device's route: its choice of tokens, and whole steps through static tensors."""

import pytest
import torch

from draft_service.choice import Chooser, ProposalSampling
from kernels import native
from kernels.graphs import Graphs
from tests.draft_service.drivers import load_proposer
from tests.draft_service.test_static_steps import SHARED, rounds
from tests.drafts import write_tiny_draft
from tests.kernels.triton_forms.conftest import INTERPRETED, close

DEVICE = "cpu" if INTERPRETED else "cuda"
VOCABULARY, KEPT = 9000, 2300  # two blocks


def test_choices_are_those_of_the_torch_form(random):
    target_ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:KEPT].sort().values
    ids = torch.tensor([5, 2299])
    samplings = [
        ProposalSampling(temperature=0.0),
        ProposalSampling(temperature=0.7, seed=2**64 - 3),
        ProposalSampling(temperature=1.3),
        ProposalSampling(temperature=1e-30, seed=7),
        ProposalSampling(temperature=1.0, seed=11, bias=(ids, torch.tensor([5.0, torch.finfo(torch.float32).min]))),
    ]
    positions = [4, 2**31 - 9, 9, 1000, 77]
    logits = random(len(samplings), KEPT) * 2
    logits[0, [7, 2200]] = 30.0
    with native.form("torch"):
        expected = Chooser(target_ids, VOCABULARY).choose(logits.cpu().clone(), samplings, positions)
    if not INTERPRETED:
        bias = ids.to(DEVICE), samplings[4].bias[1].to(DEVICE)
        samplings[4] = ProposalSampling(temperature=1.0, seed=11, bias=bias)
    found = Chooser(target_ids.to(DEVICE), VOCABULARY).choose(logits, samplings, positions)
    assert found[0].tolist() == expected[0].tolist()
    assert found[0][0] == target_ids[7]
    close(found[1].cpu(), expected[1], torch.float32)


def test_a_row_that_is_not_a_number_proposes_some_token(random):
    logits = torch.full_like(random(1, KEPT), torch.nan)
    sampling = ProposalSampling(temperature=1.0, seed=1)
    assert 0 <= Chooser(torch.arange(KEPT, device=DEVICE), KEPT).choose(logits, [sampling], [3])[0].item() < KEPT


@pytest.mark.parametrize(
    "settings", [{}, {"layout": "A''", "num_hidden_layers": 2, "norm_output": True}, {"norm_before_residual": True}]
)
def test_steps_through_static_tensors(tmp_path, settings):
    write_tiny_draft(tmp_path, **settings)
    with native.form("torch"):
        expected = rounds(load_proposer(tmp_path, SHARED), (3, 1), tokens=2, context=3)
    graphs = Graphs(torch.device(DEVICE))
    found = rounds(load_proposer(tmp_path, SHARED, graphs=graphs, device=DEVICE), (3, 1), tokens=2, context=3)
    assert len(graphs._steps) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert [chain.token_ids for chain in ours] == [chain.token_ids for chain in theirs]
        for one, other in zip(ours, theirs, strict=True):
            close(torch.tensor(one.probabilities), torch.tensor(other.probabilities), torch.float16)
