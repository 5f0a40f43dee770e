"""The draft's forward pass and its chains against the plain form, for every combination of flags."""

import itertools

import pytest

from tests.draft_service.compare import assert_same_chain, chain_and_logits, load_pair
from tests.draft_service.drivers import new_sequence, random_rows, turn

NO_AUX = {"eagle_config": {"use_aux_hidden_state": False}}
INPUTS = ({}, {"norm_before_fc": True}, {"fc_norm": True}, NO_AUX)
BIASES = {"attention_bias": True, "mlp_bias": True}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 16.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, attention_factor": {**YARN, "attention_factor": 1.3},
}


@pytest.mark.parametrize(
    ("inputs", "residual", "output"), list(itertools.product(INPUTS, (False, True), (False, True))), ids=str
)
def test_every_combination_of_flags_equals_the_plain_form(tmp_path, inputs, residual, output):
    flags = {"norm_before_residual": residual, "norm_output": output, **inputs}
    others = itertools.product((96, 320), ({}, BIASES), (1, 2), (False, True), (64, 48))
    for index, (reduced, biases, depth, qk_norm, target_hidden) in enumerate(others):
        if inputs is NO_AUX and target_hidden != 64:
            continue
        widths = {"num_hidden_layers": depth, "target_hidden_size": target_hidden, "draft_vocab_size": reduced}
        bias = {"bias": True} if biases and inputs is not NO_AUX else {}
        proposer, plain = load_pair(tmp_path / str(index), qk_norm=qk_norm, **widths, **biases, **bias, **flags)
        assert_same_chain(proposer, plain, count=7, wanted=3)


@pytest.mark.parametrize(
    "flags",
    [
        {"head_dim": 32},
        {"head_dim": 24, "num_hidden_layers": 2},
        {"num_key_value_heads": 4},
        {"logit_scale": 0.5},
        {"rms_norm_eps": 0.1},
        {"max_position_embeddings": 16},
        {"num_hidden_layers": 4, "layout": "A''"},
        {"eagle_config": {"norm_before_fc": True}},
        {"eagle_config": {"return_hidden_post_norm": True}},
        {"sliding_window": 24, "use_sliding_window": True},
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
    ],
    ids=str,
)
def test_other_settings_equal_the_plain_form(tmp_path, flags):
    proposer, plain = load_pair(tmp_path, **flags)
    assert_same_chain(proposer, plain, first=40, count=150)


@pytest.mark.parametrize("spelling", ["old", "older", "new"])
@pytest.mark.parametrize("name", SCALINGS)
def test_every_rope_in_every_spelling_equals_the_plain_form(tmp_path, name, spelling):
    kind = name.split(",")[0]
    if spelling == "new":
        # Theta inside; one at the top level is older and counts less.
        inside = {"rope_type": kind, "rope_theta": 500000.0, **SCALINGS[name]}
        rope = {"rope_parameters": inside, "rope_theta": 10000.0}
    else:
        key = "rope_type" if spelling == "old" else "type"
        rope = {"rope_scaling": {key: kind, "rope_theta": 77.0, **SCALINGS[name]}, "rope_theta": 500000.0}
    proposer, plain = load_pair(tmp_path, max_position_embeddings=64, **rope)
    assert_same_chain(proposer, plain, first=200, count=150)


@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_a_draft_window_bounds_what_a_row_sees(tmp_path, window):
    kinds = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    for index, flags in enumerate(({}, kinds)):
        proposer, plain = load_pair(tmp_path / str(index), window=window, **flags)
        assert_same_chain(proposer, plain, first=10, count=100)


def test_a_single_state_of_the_draft_width_still_goes_through_fc(tmp_path):
    # k * Ht == H: engines that tell states from fed-back rows by their width fail here.
    proposer, plain = load_pair(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [2]})
    assert_same_chain(proposer, plain, count=9)


def test_min_confidence_ends_the_chain_before_the_token_that_falls_below_it(tmp_path):
    proposer, _ = load_pair(tmp_path)
    states, tokens = random_rows(13)
    whole, _ = chain_and_logits(proposer, states, tokens)
    heads, head = [], proposer.model.head
    proposer.model.head = lambda outputs: heads.append(outputs) or head(outputs)
    confidence = whole.probabilities[0] * whole.probabilities[1]
    for threshold, kept in ((confidence * 0.999, 2), (confidence * 1.001, 1), (1.0, 0), (0.0, 5)):
        heads.clear()
        cut = proposer.step([turn(proposer, new_sequence(), 0, states, tokens, 5, threshold)])[0]
        assert cut.token_ids == whole.token_ids[:kept]
        # No step is computed for tokens that cannot be proposed any more.
        assert len(heads) == min(kept + 1, 5)
