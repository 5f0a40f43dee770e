"""Drafts that the speculators library itself wrote, and its own forward pass beside the service's.

The library's pins would replace a CPU build of torch, so it is installed without them (see the Makefile).
"""

import itertools

import pytest
import torch

from tests.draft_service.compare import chain_and_logits
from tests.draft_service.drivers import load_proposer, random_rows

pytest.importorskip("speculators", reason="speculators is not installed; `make test` installs it")

from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

# The library calls transformers as releases before the installed one wanted it.
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

STEPS, ROWS = 3, 60
NORMS = ({}, {"norm_before_fc": True}, {"fc_norm": True})
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# gpt-oss's own, which the library's training command copies into the draft.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}


def library_model(layer, reduced, **flags):
    """A draft of the library with random numbers everywhere."""
    layer._attn_implementation = "eager"
    about = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=reduced,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=about,
        **flags,
    )
    model, generator = Eagle3DraftModel(config).eval(), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        width = parameter.shape[-1] ** -0.5
        parameter.data = 1 + 0.2 * noise if "norm" in name else noise * (1.0 if "embed" in name else 2 * width)
    if reduced < 320:
        kept = torch.randperm(320, generator=generator)[:reduced].sort().values
        model.load_vocab_mappings(torch.isin(torch.arange(320), kept), kept - torch.arange(reduced))
    return model


@torch.no_grad()
def library_logits(model, states, tokens, drafted):
    """Logits of the chain after all rows, when the tokens of `drafted` are drafted.

    The library computes chains after every row at once, and feeds each the tokens that follow in the text.
    """
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs))
    extra = STEPS - 1
    padded = torch.cat([states, torch.zeros(extra, states.shape[1])])[None]
    ids = torch.tensor([[*tokens, *drafted[:extra]]])
    model(padded, ids, document_ids=torch.zeros_like(ids), ttt_steps=STEPS)
    hook.remove()
    return [logits[0, len(tokens) - 1] for logits in seen]


def assert_agree(model, directory, steps=STEPS):
    """The service reads what the library saved, and drafts what the library would in the first steps of a chain."""
    model.save_pretrained(directory)
    proposer = load_proposer(directory)
    states, tokens = random_rows(ROWS)
    chain, ours = chain_and_logits(proposer, states, tokens, wanted=STEPS)
    theirs = library_logits(model, states, tokens, chain.token_ids)
    for mine, other in zip(ours[:steps], theirs[:steps], strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "depth"), list(itertools.product((LlamaConfig, Qwen3Config), (1, 2))))
def test_every_combination_of_its_flags_agrees(tmp_path, kind, depth):
    for index, (norms, residual, output, reduced) in enumerate(
        itertools.product(NORMS, (False, True), (False, True), (96, 320))
    ):
        flags = {"norm_before_residual": residual, "norm_output": output, **norms}
        model = library_model(kind(num_hidden_layers=depth, **SIZES), reduced, **flags)
        assert_agree(model, tmp_path / str(index))


@pytest.mark.parametrize(
    "layer",
    [
        LlamaConfig(**SIZES, num_hidden_layers=2, attention_bias=True, mlp_bias=True),
        Qwen3Config(**SIZES, num_hidden_layers=2, attention_bias=True),
        LlamaConfig(**SIZES, num_hidden_layers=1, rope_parameters=LLAMA3, rms_norm_eps=1e-3),
        LlamaConfig(**SIZES, num_hidden_layers=1, rope_parameters=YARN, max_position_embeddings=1024),
    ],
    ids=["Llama biases", "Qwen3 biases", "Llama 3 rope", "gpt-oss rope"],
)
def test_settings_of_its_layers_agree(tmp_path, layer):
    assert_agree(library_model(layer, 96, norm_before_residual=True), tmp_path)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_windows_of_its_layers_agree(tmp_path, kind):
    # As its training command writes them, by default for all layers.
    windows = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}
    layer = kind(**SIZES, num_hidden_layers=2, **windows)
    # In training a chain's own rows come on top of the window; in serving they are part of it.
    assert_agree(library_model(layer, 96, norm_before_residual=True), tmp_path, steps=1)
