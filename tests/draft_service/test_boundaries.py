"""Which of the target's boundaries a config's numbers mean."""

import dataclasses

import pytest

from draft_service.boundaries import resolve_boundaries
from draft_service.description import describe
from draft_service.families import SPECULATORS
from draft_service.faults import Faults
from outrider.checkpoint import CheckpointError


@pytest.mark.parametrize(
    ("ids", "num_layers", "override", "expected", "rule"),
    [
        (None, 36, None, (2, 18, 33), "default"),
        (None, 30, None, (2, 15, 27), "default"),
        ([24, 30, 36], 36, None, (24, 30, 36), "one of them is N"),
        ([2, 18, 33], 36, None, (2, 18, 33), "equal the default"),
        ([1, 17, 32], 36, None, (2, 18, 33), "layer outputs"),
        ([33, 1, 17], 36, None, (2, 18, 34), "layer outputs"),
        ([1, 11, 21], 24, None, (2, 12, 22), "layer outputs"),
        ([1, 17, 32], 36, (1, 17, 32), (1, 17, 32), "--aux-boundaries"),
        ([-1, 17, 32], 36, (32, 2, 18), (2, 18, 32), "--aux-boundaries"),
    ],
)
def test_boundaries_follow_the_first_rule_that_applies(ids, num_layers, override, expected, rule):
    faults = Faults("draft")
    found = resolve_boundaries(description(ids), num_layers, override, faults)
    assert found.values == expected and rule in found.rule and not faults


@pytest.mark.parametrize("ids", [(24, 30, 36), (2, 18, 33), (1, 17, 32)])
def test_ids_of_speculators_are_boundaries(ids):
    faults = Faults("draft")
    draft = dataclasses.replace(description(list(ids)), family=SPECULATORS)
    found = resolve_boundaries(draft, 36, None, faults)
    assert found.values == ids and "speculators" in found.rule and not faults


@pytest.mark.parametrize("ids", [None, [1, 17, 32], [99]])
def test_without_aux_states_the_boundary_is_the_one_after_the_final_norm(ids):
    faults = Faults("draft")
    draft = dataclasses.replace(description(ids), use_aux=False, num_aux=1)
    found = resolve_boundaries(draft, 36, None, faults)
    assert found.values == (37,) and "final norm" in found.rule and not faults
    assert resolve_boundaries(draft, 36, (36,), faults).values == (36,) and not faults
    for override, part in (((38,), "expected 0..37"), ((1, 2), "expected 1, as many")):
        faults = Faults("draft")
        resolve_boundaries(draft, 36, override, faults)
        with pytest.raises(CheckpointError, match=part):
            faults.raise_if_any()


@pytest.mark.parametrize(
    ("ids", "num_layers", "override", "part"),
    [
        ([-1, 17, 32], 36, None, "expected 0..36"),
        ([1, 17, 37], 36, None, "expected 0..36"),
        ([1, 17, 32], 36, (1, 2, 37), "expected 0..36"),
        ([1, 17, 32], 36, (1, 2), "expected 3"),
        ([1, 1, 32], 36, None, "duplicates"),
        (None, 4, None, "duplicates"),
    ],
)
def test_boundaries_that_cannot_be_are_faults(ids, num_layers, override, part):
    faults = Faults("draft")
    resolve_boundaries(description(ids), num_layers, override, faults)
    with pytest.raises(CheckpointError, match=part):
        faults.raise_if_any()


def description(ids):
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), 64)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **sizes,
        "vocab_size": 320,
        "rms_norm_eps": 1e-5,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
    }
    found = describe(config, "flat", (), Faults("config"))
    assert found is not None
    return found
