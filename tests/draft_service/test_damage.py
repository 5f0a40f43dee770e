"""Whatever is done to a tensor or a key of a draft is refused by name, or is a case where proposals stay the same."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_service.check import resolve
from draft_service.layout import canonical_name
from outrider.checkpoint import CheckpointError
from tests.draft_service.compare import chain_and_logits
from tests.draft_service.damage import assert_fault, edit_config, faults_of
from tests.draft_service.drivers import load_proposer, random_rows
from tests.drafts import write_tiny_draft
from tests.models import write_tiny_llama

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEEP = {"num_hidden_layers": 2, "qk_norm": True}
DRAFTS = {
    "A": {"layout": "A", "norm_before_fc": True, "bias": True, "mlp_bias": True, "t2d": True},
    "A'": {"layout": "A'", "fc_norm": True, "draft_vocab_size": 320},
    "A''": {"layout": "A''", **DEEP, "prefix": "model."},
    "no aux": {"eagle_config": {"use_aux_hidden_state": False}},
    "B, Llama": {"layout": "B", "attention_bias": True, "mlp_bias": True, "norm_before_fc": True},
    "B, Qwen3": {"layout": "B", **DEEP, "attention_bias": True, "fc_norm": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def shared(target):
    """What the target would share."""
    tensors = load_file(target / "model.safetensors")
    return {EMBED: tensors["model.embed_tokens.weight"], HEAD: tensors["lm_head.weight"]}


@pytest.fixture(params=DRAFTS, scope="module")
def draft(request, tmp_path_factory):
    """A whole draft, with both tensors that it might share: its directory and its tensors by stored name."""
    directory = write_tiny_draft(tmp_path_factory.mktemp("draft"), embed=True, **DRAFTS[request.param])
    return directory, load_file(directory / "model.safetensors")


def with_tensors(draft, folder, tensors):
    """The draft with other tensors."""
    (folder / "config.json").write_text((draft / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    return folder


def proposals(directory, shared):
    """What it proposes, with what it lacks taken from `shared`."""
    present = {canonical_name(name) for name in load_file(directory / "model.safetensors")}
    lacking = {name: tensor for name, tensor in shared.items() if name not in present}
    proposer = load_proposer(directory, lacking)
    chain, logits = chain_and_logits(proposer, *random_rows(20, proposer.model.draft.input_width))
    return chain, torch.stack(logits)


def allowed_without(name, tensors):
    """Cases of section 4: what the target has, and the maps that then say nothing."""
    full = tensors[next(stored for stored in tensors if canonical_name(stored) == HEAD)].shape[0] == 320
    return name in (EMBED, "t2d") or (name == HEAD and full)


def test_a_deleted_tensor_is_named_or_comes_from_the_target(tmp_path, target, shared, draft):
    directory, tensors = draft
    for stored in tensors:
        rest = {name: tensor for name, tensor in tensors.items() if name != stored}
        damaged, name = with_tensors(directory, tmp_path, rest), canonical_name(stored)
        if not allowed_without(name, tensors):
            assert_fault(faults_of(damaged, target), "missing", stored)
            continue
        # The same as a complete checkpoint that holds the target's tensor.
        resolve(damaged, target)
        chain, logits = proposals(damaged, shared)
        complete = {**rest, stored: shared.get(name, tensors[stored])}
        expected, expected_logits = proposals(with_tensors(directory, tmp_path, complete), {})
        assert chain == expected and torch.equal(logits, expected_logits), name


def test_a_renamed_tensor_is_named(tmp_path, target, draft):
    directory, tensors = draft
    for stored in tensors:
        renamed = {f"{name}x" if name == stored else name: tensor for name, tensor in tensors.items()}
        lines = faults_of(with_tensors(directory, tmp_path, renamed), target)
        assert_fault(lines, f"{stored}x", "unexpected")
        if not allowed_without(canonical_name(stored), tensors):
            assert_fault(lines, "missing", stored)


def test_a_reshaped_tensor_is_named_with_both_shapes(tmp_path, target, draft):
    directory, tensors = draft
    for stored, tensor in tensors.items():
        for wrong in (tensor[:-1], tensor[None]):
            lines = faults_of(with_tensors(directory, tmp_path, {**tensors, stored: wrong.clone()}), target)
            assert_fault(lines, stored, str(list(tensor.shape)), f"found {list(wrong.shape)}")


def test_a_tensor_of_another_type_is_named(tmp_path, target, draft):
    directory, tensors = draft
    for stored, tensor in tensors.items():
        wrong = tensor.float() if not tensor.is_floating_point() else tensor.to(torch.int32)
        lines = faults_of(with_tensors(directory, tmp_path, {**tensors, stored: wrong}), target)
        assert_fault(lines, stored, f"found {wrong.dtype}")


ADDED = {
    "something.weight": (3,),
    "layers.5.input_layernorm.weight": (64,),
    "input_norm.weight": (192,),
    "fc_norm.7.weight": (64,),
    "fc.scale": (64,),
    "norm.bias": (64,),
    "lm_head.bias": (320,),
    "layers.0.self_attn.sinks": (4,),
    "layers.0.self_attn.rotary.weight": (8,),
    "layers.0.mlp.gate_up_proj.weight": (192, 64),
}
# Present in some drafts; where it is, its shape is wrong.
MAYBE = {
    "layers.0.self_attn.q_proj.bias": (63,),
    "layers.0.mlp.up_proj.bias": (95,),
    "layers.0.self_attn.q_norm.weight": (15,),
    "fc.bias": (63,),
}


def test_an_added_tensor_is_named(tmp_path, target, draft):
    directory, tensors = draft
    config = json.loads((directory / "config.json").read_text())
    without_fc = config.get("eagle_config", {}).get("use_aux_hidden_state") is False
    canonical = {canonical_name(name) for name in tensors}
    for name, shape in {**ADDED, **MAYBE}.items():
        if name in canonical or (without_fc and name.startswith("fc.")):
            continue
        added = {**tensors, name: torch.ones(shape)}
        lines = faults_of(with_tensors(directory, tmp_path, added), target)
        assert_fault(lines, name)


CONTRADICTIONS = [
    # What to write, the key, a value that something else contradicts, and what the message names.
    ("A", "hidden_size", 48, "q_proj.weight"),
    ("A", "intermediate_size", 95, "intermediate_size"),
    ("A", "num_attention_heads", 2, "num_attention_heads 2 x head_dim 16"),
    ("A", "num_key_value_heads", 4, "num_key_value_heads 4 x head_dim 16"),
    ("A", "head_dim", 8, "head_dim 8"),
    ("A", "head_dim", 15, "head_dim: expected an even number, found 15"),
    ("A", "num_hidden_layers", 2, "layers.1.input_layernorm.weight: missing"),
    ("A''", "num_hidden_layers", 1, "num_hidden_layers is 1"),
    ("A''", "num_hidden_layers", 3, "layers.2.mlp.up_proj.weight: missing"),
    ("A", "vocab_size", 336, "vocab_size"),
    ("A", "vocab_size", 300, "vocab_size"),
    ("A", "draft_vocab_size", 95, "draft_vocab_size"),
    ("A", "draft_vocab_size", 320, "[320, 64]"),
    ("A'", "draft_vocab_size", 96, "d2t: missing"),
    ("A", "target_hidden_size", 48, "target_hidden_size 48"),
    ("no aux", "target_hidden_size", 48, "target_hidden_size: expected hidden_size 64"),
    ("A", "num_aux_hidden_states", 2, "num_aux_hidden_states: 2, but there are 3 layer ids"),
    ("A", "norm_before_fc", False, "input_norm.weight in model.safetensors: unexpected (norm_before_fc is false)"),
    ("A'", "norm_before_fc", True, "fc_norm and norm_before_fc"),
    ("A'", "fc_norm", False, "fc_norm.0.weight in model.safetensors: unexpected (fc_norm is false"),
    ("A''", "fc_norm", True, "fc_norm.0.weight: missing"),
    ("no aux", "fc_norm", True, "fc_norm true and use_aux_hidden_state false contradict"),
    ("no aux", "norm_before_fc", True, "norm_before_fc true and use_aux_hidden_state false contradict"),
    ("A", "attention_bias", True, "q_proj.bias: missing"),
    ("B, Llama", "attention_bias", False, "q_proj.bias in model.safetensors: unexpected (attention_bias is false)"),
    ("A", "mlp_bias", False, "midlayer.mlp.up_proj.bias: unexpected (mlp_bias is false)"),
    ("B, Qwen3", "mlp_bias", True, "mlp_bias true and model_type 'qwen3' contradict"),
    ("A", "bias", False, "fc.bias in model.safetensors: unexpected (bias is false)"),
    ("A'", "bias", True, "fc.bias: missing"),
    ("A", "model_type", "qwen3", "q_norm.weight: missing"),
    ("B, Qwen3", "model_type", "llama", "q_norm.weight in model.safetensors: unexpected (model_type is not qwen3)"),
    ("B, Llama", "model_type", "qwen3", "q_norm.weight: missing"),
    ("A", "eagle_aux_hidden_state_layer_ids", [0, 1, 3], "contradict"),
    ("A", "architectures", ["Eagle3Speculator"], "architectures: expected LlamaForCausalLMEagle3"),
    ("B, Llama", "architectures", ["LlamaForCausalLMEagle3"], "architectures: expected Eagle3Speculator"),
    ("A", "hidden_act", "gelu", "hidden_act: expected 'silu'"),
    ("A", "tie_word_embeddings", True, "tie_word_embeddings true"),
    ("A", "logit_scale", "big", "logit_scale: expected a positive number"),
    ("A", "rms_norm_eps", -1, "rms_norm_eps: expected a positive number"),
    ("A", "norm_output", 1, "norm_output: expected true or false"),
    ("A", "norm_before_residual", "no", "norm_before_residual: expected true or false"),
    ("A", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "rope_type: expected"),
    ("A", "rope_scaling", {"rope_type": "llama3", "factor": 2.0}, "original_max_position_embeddings"),
    ("A", "rope_scaling", {"rope_type": "yarn", "factor": "two"}, "rope_scaling"),
    ("A", "partial_rotary_factor", 0.5, "partial_rotary_factor: expected 1"),
    ("A", "sliding_window", 16, "sliding_window 16: expected use_sliding_window or layer_types"),
    ("A", "use_sliding_window", True, "sliding_window: missing"),
    ("A", "layer_types", ["sliding_attention"], "sliding_window: expected a size"),
    ("A", "layer_types", ["chunked_attention"], "layer_types: expected a list"),
    ("A''", "layer_types", ["sliding_attention"] * 3, "layer_types: expected 2, as many as num_hidden_layers"),
    ("A", "eagle_config", {"norm_output": True, "return_hidden_post_norm": False}, "contradict"),
    ("A''", "eagle_config", {"next_layer_regular": False}, "next_layer_regular false"),
    ("A", "eagle_config", [1], "eagle_config: expected an object"),
    ("A", "eagle_config", {"parallel_draft_step": "two"}, "parallel_draft_step 'two': a sign of parallel draft heads"),
    ("A", "model_type", "gemma", "model_type: expected 'llama' or 'qwen3', found 'gemma'"),
    ("no aux", "bias", True, "bias true and use_aux_hidden_state false contradict"),
    ("A", "rope_scaling", {"factor": 8.0}, "rope_scaling: expected a rope_type, found only ['factor']"),
    (
        "A",
        "rope_scaling",
        {"type": "linear", "rope_type": "yarn", "factor": 2.0},
        "'yarn' and type 'linear' contradict",
    ),
    ("A", "rope_parameters", [1], "rope_parameters: expected an object"),
    ("A", "rope_scaling", {"rope_type": "linear", "factor": -2.0}, "rope_scaling.factor: expected at least 1"),
    (
        "A",
        "rope_scaling",
        {**LLAMA3, "high_freq_factor": 0.5},
        "expected low_freq_factor below high_freq_factor, found 1.0 and 0.5",
    ),
    ("A", "rope_theta", "x", "rope_theta: expected a positive number"),
    ("A", "num_hidden_layers", 10**9, "num_hidden_layers: 1000000000, but the file has tensors of 1"),
    ("A", "head_dim", 10**30, "head_dim: expected a positive integer of 31 bits"),
    ("B, Llama", "norm_before_fc", False, "norm_before_fc True and transformer_layer_config.norm_before_fc False"),
    ("B, Llama", "speculators_config", "x", "speculators_config: expected an object"),
]
TOP_LEVEL = ("architectures", "eagle_aux_hidden_state_layer_ids", "speculators_config")


@pytest.mark.parametrize(("name", "key", "value", "part"), CONTRADICTIONS, ids=lambda value: str(value)[:40])
def test_a_contradicted_key_is_named(tmp_path, target, name, key, value, part):
    directory = write_tiny_draft(tmp_path, embed=True, **DRAFTS[name])
    layer = json.loads((directory / "config.json").read_text()).get("transformer_layer_config")
    if layer is None or key in TOP_LEVEL:
        edit_config(directory, **{key: value})
    else:
        edit_config(directory, transformer_layer_config={**layer, key: value})
    assert_fault(faults_of(directory, target), part)


def test_two_places_of_one_key_may_not_differ(tmp_path, target):
    directory = write_tiny_draft(tmp_path, layout="B", embed=True)
    for key, value in (("hidden_size", 128), ("rope_theta", 5.0), ("attention_bias", True)):
        layer = json.loads((directory / "config.json").read_text())["transformer_layer_config"]
        edit_config(
            directory, transformer_layer_config={"hidden_size": 64, **layer, "rope_theta": 1e4, "attention_bias": False}
        )
        edit_config(directory, **{key: value})
        assert_fault(faults_of(directory, target), f"{key} {value!r} and transformer_layer_config.{key}", "contradict")
        edit_config(directory, **{key: None})


def test_what_the_top_level_says_of_a_silent_layer_is_no_secret(tmp_path, target):
    """The nested config leaves out what equals a default: another value above it contradicts that."""
    directory = write_tiny_draft(tmp_path, layout="B", embed=True)
    for key, value in (("attention_bias", True), ("mlp_bias", True), ("head_dim", 32), ("rope_scaling", LLAMA3)):
        layer = json.loads((directory / "config.json").read_text())["transformer_layer_config"]
        layer.pop(key, None)
        edit_config(directory, transformer_layer_config=layer, **{key: value})
        assert_fault(faults_of(directory, target), f"{key} ", "expected in transformer_layer_config")
        edit_config(directory, **{key: None})
    # Keys of the flat layout count here too.
    for key, value, part in (
        ("eagle_config", {"norm_before_fc": True}, "input_norm.weight: missing"),
        ("use_aux_norm", True, "fc_norm.0.weight: missing"),
        ("bias", True, "fc.bias: missing"),
    ):
        edit_config(directory, **{key: value})
        assert_fault(faults_of(directory, target), part)
        edit_config(directory, **{key: None})
    edit_config(directory, use_aux_hidden_state=False)
    assert resolve(directory, target)["boundaries"].startswith("5 ")


def test_the_old_and_the_new_spelling_of_a_rope_may_not_differ(tmp_path, target):
    new = {**LLAMA3, "rope_theta": 1e6}
    directory = write_tiny_draft(tmp_path, embed=True, rope_parameters=new, rope_scaling=LLAMA3)
    assert resolve(directory, target)["rope"] == "llama3 theta 1e+06 factor 8"
    for other in ({"rope_type": "default"}, {**LLAMA3, "factor": 4.0}):
        edit_config(directory, rope_parameters=other)
        assert_fault(faults_of(directory, target), "rope_parameters", "rope_scaling", "contradict each other")


ODD = ("x", -1, 0, 2.5, True, [], [1], {}, {"a": 1}, 10**30)


def test_no_value_of_any_key_crashes(tmp_path, target, draft):
    directory, tensors = draft
    with_tensors(directory, tmp_path, tensors)
    config = json.loads((directory / "config.json").read_text())
    places = [(), *(place for place in (("eagle_config",), ("transformer_layer_config",)) if place[0] in config)]
    others = ("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "speculators_config", "bias")
    for place in places:
        inside = config[place[0]] if place else config
        for key in (*inside, *others):
            for value in ODD:
                changed = {**inside, key: value}
                (tmp_path / "config.json").write_text(json.dumps({**config, place[0]: changed} if place else changed))
                with contextlib.suppress(CheckpointError):
                    resolve(tmp_path, target)
