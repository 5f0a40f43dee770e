"""The draft's forward pass and its chains against the plain form, for every combination of flags."""

import itertools
import json

import pytest
import torch

from tests.draft_service.drivers import extend, load_proposer, new_sequence, random_rows, turn
from tests.draft_service.reference import PlainDraft
from tests.drafts import draft_tensors, write_tiny_draft

NORMS = ({}, {"norm_before_fc": True}, {"fc_norm": True})
BIASES = {"attention_bias": True, "mlp_bias": True, "bias": True}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def load_pair(directory, mutation="", **flags):
    """The product's proposer and the plain form over the same tensors, the embedding in the checkpoint."""
    write_tiny_draft(directory, embed=True, **flags)
    config = json.loads((directory / "config.json").read_text())
    return load_proposer(directory), PlainDraft(config, draft_tensors(config, flags.get("seed", 0)), mutation)


def record_logits(proposer, monkeypatch):
    """Collects the logits of every head call."""
    seen, head = [], proposer.model.head

    def recording(outputs):
        logits, fed_back = head(outputs)
        seen.append(logits.clone())
        return logits, fed_back

    monkeypatch.setattr(proposer.model, "head", recording)
    return seen


def assert_same_chain(proposer, plain, monkeypatch, first=0, count=13, wanted=5):
    states, tokens = random_rows(count)
    seen = record_logits(proposer, monkeypatch)
    chain = extend(proposer, new_sequence(), first, states, tokens, wanted)
    drafted, logits = plain.chain(states, tokens, first, wanted)
    for ours, theirs in zip(seen, logits, strict=True):
        torch.testing.assert_close(ours[0].double(), theirs, atol=2e-4, rtol=1e-4)
    assert chain.token_ids == drafted
    for probability, row, token in zip(chain.probabilities, logits, drafted, strict=True):
        ids = [plain.target_id(j) for j in range(len(row))]
        assert probability == pytest.approx(row.softmax(0)[ids.index(token)].item(), rel=1e-3)


@pytest.mark.parametrize(
    ("residual", "output", "norms", "reduced", "biases"),
    list(itertools.product((False, True), (False, True), NORMS, (96, 320), ({}, BIASES))),
)
def test_logits_and_chain_equal_the_plain_form(tmp_path, monkeypatch, residual, output, norms, reduced, biases):
    flags = {"norm_before_residual": residual, "norm_output": output, **norms, **biases}
    proposer, plain = load_pair(tmp_path, draft_vocab_size=reduced, **flags)
    assert_same_chain(proposer, plain, monkeypatch)


@pytest.mark.parametrize(
    "flags",
    [
        {"head_dim": 32},
        {"num_key_value_heads": 4},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"logit_scale": 0.5},
        {"rms_norm_eps": 0.1},
        {"eagle_config": {"norm_before_fc": True}},
    ],
    ids=str,
)
def test_other_settings_equal_the_plain_form(tmp_path, monkeypatch, flags):
    proposer, plain = load_pair(tmp_path, **flags)
    assert_same_chain(proposer, plain, monkeypatch, first=40, count=150)


def test_a_single_state_of_the_draft_width_still_goes_through_fc(tmp_path, monkeypatch):
    # k * Ht == H: engines that tell states from fed-back rows by their width fail here.
    flags = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2]}}
    proposer, plain = load_pair(tmp_path, **flags)
    states, tokens = random_rows(9, width=64)
    seen = record_logits(proposer, monkeypatch)
    chain = extend(proposer, new_sequence(), 0, states, tokens, 4)
    drafted, logits = plain.chain(states, tokens, 0, 4)
    torch.testing.assert_close(torch.cat(seen).double(), torch.stack(logits), atol=2e-4, rtol=1e-4)
    assert chain.token_ids == drafted


@pytest.mark.parametrize("mutation", ["swapped concat", "d2t absolute", "wrong feedback", "token shift 0", "shift 2"])
def test_the_plain_form_catches_mistakes(tmp_path, monkeypatch, mutation):
    proposer, plain = load_pair(tmp_path, mutation)
    states, tokens = random_rows(13)
    shifted = {"token shift 0": tokens[1:] + tokens[:1], "shift 2": tokens[-1:] + tokens[:-1]}.get(mutation, tokens)
    chain = extend(proposer, new_sequence(), 0, states, tokens, 5)
    drafted, _ = plain.chain(states, shifted, 0, 5)
    assert chain.token_ids != drafted


def test_layouts_prefixes_and_shards_give_the_same_bits(tmp_path, monkeypatch):
    states, tokens = random_rows(13)
    found = []
    for index, (layout, prefix) in enumerate(itertools.product(("A", "A'"), ("", "model."))):
        directory = write_tiny_draft(tmp_path / str(index), layout=layout, prefix=prefix, embed=True, t2d=True)
        proposer = load_proposer(directory)
        seen = record_logits(proposer, monkeypatch)
        extend(proposer, new_sequence(), 0, states, tokens, 4)
        found.append(torch.cat(seen))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_min_confidence_ends_the_chain_before_the_token_that_falls_below_it(tmp_path, monkeypatch):
    proposer, _ = load_pair(tmp_path)
    heads = record_logits(proposer, monkeypatch)
    states, tokens = random_rows(13)
    whole = extend(proposer, new_sequence(), 0, states, tokens, 5)
    confidence = whole.probabilities[0] * whole.probabilities[1]
    for threshold, kept in ((confidence * 0.999, 2), (confidence * 1.001, 1), (1.0, 0), (0.0, 5)):
        sequence = new_sequence()
        heads.clear()
        cut = proposer.step([turn(proposer, sequence, 0, states, tokens, 5, threshold)])[0]
        assert cut.token_ids == whole.token_ids[:kept]
        # No step is computed for tokens that cannot be proposed any more.
        assert len(heads) == min(kept + 1, 5)
