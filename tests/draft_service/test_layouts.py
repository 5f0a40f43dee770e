"""The same numbers in every layout and spelling give the same bits, and every number counts."""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.draft_service.compare import assert_same_chain, chain_and_logits
from tests.draft_service.damage import edit, edit_config
from tests.draft_service.drivers import load_proposer, random_rows
from tests.draft_service.reference import PlainDraft
from tests.drafts import LAYOUTS, draft_tensors, tiny_config, write_tiny_draft

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DRAFTS = {
    "plain": {},
    "one norm, all flags": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "deep": {"num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True, "draft_vocab_size": 320},
    "deep, Qwen3, norms": {"num_hidden_layers": 2, "qk_norm": True, "fc_norm": True, "attention_bias": True},
    "Llama's rope": {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "t2d": True, "dtype": torch.bfloat16},
    "another width": {"target_hidden_size": 48, "norm_output": True},
}
ROWS = 70


def bits(directory, width=64):
    """Probabilities and logits of a chain, as one tensor."""
    proposer = load_proposer(directory, target_hidden_size=width)
    states, tokens = random_rows(ROWS, proposer.model.draft.input_width)
    chain, logits = chain_and_logits(proposer, states, tokens, wanted=4)
    return chain, torch.stack(logits)


@pytest.mark.parametrize("name", DRAFTS)
def test_every_layout_gives_the_same_bits(tmp_path, name):
    draft = DRAFTS[name]
    layouts = [layout for layout in LAYOUTS if layout != "A" or "deep" not in name]
    found = []
    for index, (layout, prefix) in enumerate(itertools.product(layouts, ("", "model."))):
        written = {"layout": layout, "prefix": prefix, "shards": 1 + 2 * (index % 2), "embed": True, **draft}
        found.append(bits(write_tiny_draft(tmp_path / str(index), **written), draft.get("target_hidden_size", 64)))
    for chain, logits in found[1:]:
        assert chain == found[0][0] and torch.equal(logits, found[0][1])


def renamed(directory, change):
    """Renames the tensors of a draft, or drops them where there is no new name."""
    path = directory / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in tensors.items() if name}, path)


AUX_NORMS = {f"fc_norm.{j}.weight": f"aux_norm_{level}.weight" for j, level in enumerate(("low", "mid", "high"))}


@pytest.mark.parametrize(
    ("draft", "change", "settings"),
    [
        # SGLang's old names of the norms, and of their flag.
        ({"fc_norm": True}, lambda name: AUX_NORMS.get(name, name), {"fc_norm": None, "use_aux_norm": True}),
        # Settings at the other of the two places where files have them.
        (
            {"norm_before_fc": True, "norm_output": True},
            None,
            {
                "norm_before_fc": None,
                "norm_output": None,
                "eagle_aux_hidden_state_layer_ids": [2, 1, 0],
                "eagle_config": {"norm_before_fc": True, "return_hidden_post_norm": True},
            },
        ),
        # Silence where the default says the same.
        (
            {"draft_vocab_size": 320, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8},
            None,
            dict.fromkeys(
                ("draft_vocab_size", "head_dim", "num_hidden_layers", "rope_theta", "max_position_embeddings")
            ),
        ),
        ({"layout": "B", "num_hidden_layers": 2}, None, {"architectures": ["Eagle3DraftModel"]}),
        # Later layers' first norm by its other name, in a file that is deep otherwise.
        (
            {"num_hidden_layers": 2},
            lambda name: name.replace("layers.1.input_layernorm", "layers.1.hidden_norm"),
            {},
        ),
    ],
    ids=["aux_norm", "nested", "defaults", "Eagle3DraftModel", "later hidden_norm"],
)
def test_every_spelling_gives_the_same_bits(tmp_path, draft, change, settings):
    found = []
    for folder in (tmp_path / "usual", tmp_path / "other"):
        write_tiny_draft(folder, embed=True, **draft)
        if folder.name == "other":
            edit_config(folder, **settings)
            renamed(folder, change or (lambda name: name))
        found.append(bits(folder))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_what_a_draft_without_aux_states_has_no_use_for_is_ignored(tmp_path):
    settings = {"embed": True, "eagle_config": {"use_aux_hidden_state": False}}
    plain = write_tiny_draft(tmp_path / "plain", **settings)
    more = edit(
        write_tiny_draft(tmp_path / "more", **settings), fc__weight=torch.ones(64, 192), fc__bias=torch.ones(64)
    )
    found = [bits(directory) for directory in (plain, more)]
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_a_flat_draft_may_have_biases_of_query_key_and_value_alone(tmp_path):
    directory = edit(
        write_tiny_draft(tmp_path, embed=True, attention_bias=True), layers__0__self_attn__o_proj__bias=None
    )
    proposer = load_proposer(directory)
    config = tiny_config(attention_bias=True)
    tensors = draft_tensors(config, 0)
    del tensors["layers.0.self_attn.o_proj.bias"]
    assert_same_chain(proposer, PlainDraft(config, tensors))


def test_integers_of_the_map_may_be_of_32_bits(tmp_path):
    directory = write_tiny_draft(tmp_path, embed=True, t2d=True)
    before = bits(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "d2t": tensors["d2t"].int()}, path)
    assert bits(directory)[0] == before[0]


@pytest.mark.parametrize("layout", ["A", "A''", "B"])
def test_perturbing_any_tensor_changes_what_is_proposed(tmp_path, layout):
    deep = {} if layout == "A" else {"num_hidden_layers": 2, "qk_norm": True}
    norms = {"norm_before_fc": True} if layout == "A" else {"fc_norm": True}
    biases = {"attention_bias": True, "mlp_bias": not deep, "bias": layout == "A"}
    directory = write_tiny_draft(tmp_path, layout=layout, embed=True, **deep, **norms, **biases)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    chain, logits = bits(directory)
    for name, tensor in tensors.items():
        if name == "d2t":
            # Two entries swapped for others that are still free, so that the map stays valid.
            taken = set((tensor + torch.arange(96)).tolist())
            free = torch.tensor([token for token in range(320) if token not in taken][:96])
            changed = free - torch.arange(96)
        else:
            changed = tensor + 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        save_file({**tensors, name: changed}, path)
        other_chain, other_logits = bits(directory)
        if name == "d2t":
            assert other_chain.token_ids != chain.token_ids
        else:
            assert not torch.equal(other_logits[0], logits[0]), name
