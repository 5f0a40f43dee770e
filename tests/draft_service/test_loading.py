"""Checkpoints: what is resolved, and every way in which one is refused, all faults at once."""

import json

import pytest
import torch

from draft_service.check import main, resolve
from draft_service.faults import Faults
from draft_service.inspection import fit, inspect_draft
from draft_service.weights import serving_dtype
from outrider.checkpoint import CheckpointError
from tests.draft_service.damage import assert_fault, edit, faults_of
from tests.draft_service.drivers import TARGET
from tests.drafts import write_tiny_draft
from tests.models import write_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("target"))


def test_everything_resolved_is_printed_and_the_exit_code_is_zero(tmp_path, target, capsys):
    write_tiny_draft(tmp_path, fc_norm=True, norm_output=True, attention_bias=True, bias=True, layout="A")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--target", str(target)])
    assert ended.value.code == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    lines = {name.strip(): value.strip() for name, value in lines.items()}
    assert lines["boundaries"] == "1, 2, 3 (ids [0, 1, 2] are layer outputs: one more each)"
    assert lines["norms on target states"] == "fc_norm" and lines["fed back"] == "norm(o)" and lines["residual"] == "g"
    assert lines["biases"] == "attention_bias, fc_bias"
    assert lines["embed_tokens"] == "from the target" and lines["lm_head"] == "from the checkpoint"
    assert lines["draft vocabulary"] == "96 of 320, mapped by d2t" and lines["rope"] == "default theta 10000"


def test_every_fault_is_listed_at_once_and_the_exit_code_is_one(tmp_path, target, capsys):
    directory = write_tiny_draft(tmp_path, vocab_size=400, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 9]})
    edit(
        directory,
        layers__0__mlp__up_proj__weight=None,
        layers__0__self_attn__q_proj__weight=torch.zeros(64, 64),
        layers__0__self_attn__k_proj__weight=torch.zeros(32, 128, dtype=torch.int64),
        something__else=torch.zeros(1),
        input_norm__weight=torch.ones(128),
        fc__weight=torch.zeros(64, 192),
    )
    with pytest.raises(SystemExit) as ended:
        main([str(directory), "--target", str(target)])
    assert ended.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert "8 faults" in lines[0]
    assert_fault(lines, "mlp.up_proj.weight: missing", "[96, 64]")
    assert_fault(lines, "q_proj.weight in model.safetensors: expected [64, 128]", "2 x hidden_size", "found [64, 64]")
    assert_fault(lines, "k_proj.weight", "bfloat16 or float16 or float32", "int64")
    assert_fault(lines, "something.else in model.safetensors: unexpected")
    assert_fault(lines, "input_norm.weight in model.safetensors: unexpected (norm_before_fc is false)")
    assert_fault(
        lines, "fc.weight", "2 hidden states", "eagle_aux_hidden_state_layer_ids [0, 9]", "[64, 128]", "[64, 192]"
    )
    assert_fault(lines, "aux boundaries [0, 9]", "expected 0..4")
    assert_fault(lines, "vocab_size", "400", "320")


@pytest.mark.parametrize(
    ("written", "tensors", "parts"),
    [
        ({}, {"lm_head__weight": None}, ("lm_head.weight: missing", "reduced draft vocabulary, 96 of 320")),
        ({}, {"d2t": None}, ("d2t: missing", "reduced draft vocabulary")),
        ({}, {"lm_head__weight": torch.zeros(95, 64)}, ("lm_head.weight", "[96, 64]", "[95, 64]")),
        ({}, {"d2t": torch.zeros(96)}, ("d2t", "int64 or int32", "float32")),
        ({}, {"d2t": torch.full((96,), 300)}, ("d2t: entry 20 maps to target id 320", "offsets")),
        ({}, {"d2t": -torch.arange(96)}, ("two draft ids map to one",)),
        ({"t2d": True}, {"t2d": torch.ones(320).bool()}, ("t2d: marks 320",)),
        ({"draft_vocab_size": 320}, {"d2t": torch.ones(320).long()}, ("d2t: expected zeros",)),
        ({"draft_vocab_size": 321}, {}, ("draft_vocab_size: 321 is larger than vocab_size 320",)),
        ({"hidden_size": 48, "target_hidden_size": 64}, {}, ("embed_tokens.weight: missing", "[320, 64]", "[320, 48]")),
        (
            {"hidden_size": 48, "target_hidden_size": 64, "draft_vocab_size": 320, "head": False},
            {},
            ("lm_head.weight",),
        ),
        ({"norm_before_fc": True}, {"input_norm__weight": None}, ("input_norm.weight: missing", "norm_before_fc")),
        ({"fc_norm": True}, {"fc_norm__1__weight": None}, ("fc_norm.1.weight: missing",)),
        ({}, {"fc_norm__0__weight": torch.ones(64)}, ("fc_norm.0.weight", "unexpected", "fc_norm is false")),
        ({}, {"aux_norm_low__weight": torch.ones(64)}, ("fc_norm.0.weight", "unexpected")),
        ({"fc_norm": True, "norm_before_fc": True}, {}, ("fc_norm and norm_before_fc are both true",)),
        ({}, {"fc__weight": None}, ("fc.weight: missing",)),
        ({"attention_bias": True}, {"layers__0__self_attn__v_proj__bias": None}, ("v_proj.bias: missing",)),
        ({}, {"layers__0__self_attn__q_proj__bias": torch.zeros(64)}, ("unexpected (attention_bias is false)",)),
        ({}, {"midlayer__hidden_norm__weight": torch.ones(64)}, ("two names for one tensor", "hidden_norm")),
        ({"hidden_act": "gelu"}, {}, ("hidden_act: expected 'silu'",)),
        ({"sliding_window": 128}, {}, ("sliding_window 128",)),
        ({"tie_word_embeddings": True}, {}, ("tie_word_embeddings",)),
        ({"norm_output": "yes"}, {}, ("norm_output: expected true or false",)),
        ({"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}, {}, ("contradict",)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, {}, ("contradict",)),
        ({"num_aux_hidden_states": 2}, {}, ("num_aux_hidden_states: 2", "3 layer ids")),
        ({"rope_scaling": {"rope_type": "longrope"}}, {}, ("rope", "longrope")),
        ({"rope_scaling": {"rope_type": "linear"}}, {}, ("rope", "factor")),
        ({"num_key_value_heads": 3}, {}, ("num_key_value_heads: 3 does not divide",)),
        ({"head_dim": None, "num_attention_heads": 7, "num_key_value_heads": 7}, {}, ("head_dim: missing",)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}}, {}, ("no duplicates",)),
    ],
    ids=str,
)
def test_a_wrong_checkpoint_is_refused(tmp_path, target, written, tensors, parts):
    config = dict(written)
    if config.get("head_dim", 0) is None:  # the builder needs a width; the config then loses it
        del config["head_dim"]
    directory = write_tiny_draft(tmp_path, **config)
    if written.get("head_dim", 0) is None:
        path = directory / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "head_dim"}))
    assert_fault(faults_of(edit(directory, **tensors), target), *parts)


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "num_key_value_heads", "rms_norm_eps"],
)
def test_a_missing_size_is_named(tmp_path, target, key):
    path = write_tiny_draft(tmp_path) / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))
    assert_fault(faults_of(tmp_path, target), f"{key}: missing")


def test_names_that_training_leaves_behind_are_ignored(tmp_path, target):
    directory = write_tiny_draft(tmp_path, t2d=True)
    edit(
        directory,
        verifier_norm__weight=torch.ones(64),
        verifier_lm_head__weight=torch.ones(2, 2),
        layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
    )
    resolve(directory, target)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
        (torch.float16, "auto", torch.float32),  # no kernel computes in half precision
        (torch.float16, "bfloat16", torch.bfloat16),
    ],
)
def test_the_dtype_that_it_serves_in(tmp_path, stored, asked, expected):
    faults = Faults("draft")
    draft = inspect_draft(write_tiny_draft(tmp_path, dtype=stored, embed=True), faults)
    assert serving_dtype(fit(draft, TARGET, None, faults), asked) == expected and not faults


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path, target):
    lines = faults_of(target, target)
    assert_fault(lines, "architectures", "LlamaForCausalLM")
    with pytest.raises(CheckpointError, match="nothing"):
        resolve(tmp_path / "nothing", target)
    draft = write_tiny_draft(tmp_path / "draft")
    assert_fault(faults_of(draft, tmp_path / "nothing"), "the target", "nothing")
