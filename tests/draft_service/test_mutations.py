"""The comparisons notice the mistakes that engines make: none of them crashes, all of them propose badly."""

import dataclasses

import pytest
import torch

from draft_service.boundaries import resolve_boundaries
from draft_service.faults import Faults
from draft_service.inspection import inspect_draft
from tests.draft_service.compare import assert_same_chain, load_pair
from tests.draft_service.drivers import random_rows
from tests.drafts import write_tiny_draft

DEEP = {"num_hidden_layers": 2, "qk_norm": True}
NORMS = [
    ({}, "layers.0.input_layernorm"),
    ({}, "layers.0.hidden_norm"),
    ({}, "layers.0.post_attention_layernorm"),
    ({}, "norm"),
    ({"norm_before_fc": True}, "input_norm"),
    ({"fc_norm": True}, "fc_norm.0"),
    ({"fc_norm": True}, "fc_norm.2"),
    (DEEP, "layers.0.self_attn.q_norm"),
    (DEEP, "layers.1.self_attn.k_norm"),
    (DEEP, "layers.1.input_layernorm"),
    (DEEP, "layers.1.post_attention_layernorm"),
]


@pytest.mark.parametrize(
    ("flags", "mutation"),
    [
        *[(flags, "swapped concat") for flags in ({}, DEEP)],
        *[(flags, "d2t absolute") for flags in ({}, DEEP)],
        *[({"norm_output": output}, "wrong feedback") for output in (False, True)],
        *[({"norm_before_residual": residual}, "wrong residual") for residual in (False, True)],
        *[(flags, f"no {norm}") for flags, norm in NORMS],
    ],
    ids=str,
)
def test_a_mistake_in_the_forward_pass_is_noticed(tmp_path, flags, mutation):
    proposer, plain = load_pair(tmp_path, mutation, **flags)
    with pytest.raises(AssertionError):
        assert_same_chain(proposer, plain)
    # And nothing but the mistake is wrong.
    plain.mutation = ""
    plain.norm_output = bool(flags.get("norm_output"))
    assert_same_chain(proposer, plain)


@pytest.mark.parametrize("shift", [0, 2])
def test_another_token_shift_is_noticed(tmp_path, shift):
    proposer, plain = load_pair(tmp_path)
    chain = plain.chain

    def shifted(states, tokens, first, count):
        # Row i pairs with the token at i + 1; here with the one at i, or at i + 2.
        moved = [0, *tokens[:-1]] if shift == 0 else [*tokens[1:], 0]
        return chain(states, moved, first, count)

    plain.chain = shifted
    with pytest.raises(AssertionError):
        assert_same_chain(proposer, plain)


@pytest.mark.parametrize("mistake", ["one off", "reversed", "positions from 1 in the middle"])
def test_states_of_other_layers_or_places_are_noticed(tmp_path, mistake):
    proposer, plain = load_pair(tmp_path)
    chain = plain.chain

    def mistaken(states, tokens, first, count):
        parts = states.split(64, dim=1)
        if mistake == "one off":
            # Boundaries b + 1: the last of them is a state that the right ones lack.
            states = torch.cat([*parts[1:], random_rows(len(states), 64, seed=9)[0]], dim=1)
        elif mistake == "reversed":
            states = torch.cat(parts[::-1], dim=1)
        else:
            states = torch.cat([states[:6], states[7:], states[-1:]])
        return chain(states, tokens, first, count)

    plain.chain = mistaken
    with pytest.raises(AssertionError):
        assert_same_chain(proposer, plain)


@pytest.mark.parametrize("layout", ["A", "B"])
def test_layer_ids_one_off_are_other_boundaries(tmp_path, layout):
    draft = inspect_draft(write_tiny_draft(tmp_path, layout=layout), Faults("draft"))
    assert draft is not None and draft.description.layer_ids is not None

    def boundaries(shift):
        ids = tuple(i + shift for i in draft.description.layer_ids)
        return resolve_boundaries(dataclasses.replace(draft.description, layer_ids=ids), 8, None, Faults("draft"))

    assert boundaries(0).values == (1, 2, 3)
    assert boundaries(1).values == (2, 3, 4)
