"""The target's engine on the device's route: static tensors, kernels, choices. On a device its steps are captured."""

import torch

from kernels import native
from kernels.graphs import Graphs
from kernels.sampling import SamplingParams
from target_service.models import load_model
from tests.kernels.triton_forms.conftest import INTERPRETED
from tests.kernels.triton_forms.test_model import EXPERTS, SMALL
from tests.models import write_tiny_gpt_oss
from tests.target_service.driving import Request, make_engine, run, with_mistakes

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
REQUESTS = [
    Request([3, 1, 4, 1, 5], max_new=6),
    Request(
        [5, 3, 5, 8, 9, 7], SamplingParams(temperature=0.7, seed=2**63 + 1, top_k=20, min_p=0.01), max_new=4, comes=2
    ),
]
# The interpreter computes bfloat16 wrongly.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16


def test_chains_have_the_tokens_of_the_torch_form_and_the_bits_of_single_rows(tmp_path):
    directory = write_tiny_gpt_oss(tmp_path, dtype=DTYPE, tokenizer=False, **SMALL, **EXPERTS)
    model, graphs = load_model(directory, DEVICE, DTYPE), Graphs(DEVICE)
    single = run(make_engine(model), REQUESTS)
    chains = run(make_engine(model, graphs), REQUESTS, with_mistakes(single, (3, 5, 0), 96))
    for ours, alone in zip(chains, single, strict=True):
        assert ours.tokens == alone.tokens
        assert torch.equal(ours.hidden, alone.hidden)
    assert len(graphs._steps) > 1
    with native.form("torch"):
        expected = run(make_engine(load_model(directory, "cpu", torch.float32)), REQUESTS)
    for ours, theirs in zip(chains, expected, strict=True):
        if INTERPRETED:  # in bfloat16 near-ties decide
            assert ours.tokens == theirs.tokens
            torch.testing.assert_close(ours.hidden, theirs.hidden, rtol=1e-3, atol=1e-3)
