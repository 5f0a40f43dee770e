"""Foreign kinds of drafts are refused by name; what two directories are not is said exactly."""

import json

import pytest
import torch

from draft_service.check import resolve
from tests.draft_service.damage import assert_fault, edit, edit_config, faults_of
from tests.drafts import write_tiny_draft
from tests.models import write_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(
    ("config", "tensors", "parts"),
    [
        ({"speculators_model_type": "eagle3"}, {}, ("expected Eagle3Speculator", "LlamaForCausalLMEagle3")),
        ({"speculators_version": "1", "speculators_config": {}}, {}, ("expected 'eagle3', found none",)),
        ({"speculators_model_type": "peagle"}, {}, ("'peagle'", "another algorithm")),
        ({"speculators_config": {"algorithm": "dflash"}}, {}, ("'dflash'",)),
        ({"kv_lora_rank": 512}, {}, ("kv_lora_rank", "MLA")),
        ({"mask_token_id": 5}, {}, ("mask_token_id", "P-EAGLE")),
        ({"parallel_drafting": True}, {}, ("parallel_drafting", "P-EAGLE")),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, ("quantised",)),
        ({"eagle_config": {"use_mtp_layernorm": True}}, {}, ("use_mtp_layernorm",)),
        ({"eagle_config": {"eh_proj_before_attn": True}}, {}, ("eh_proj",)),
        ({"eagle_config": {"parallel_draft_step": 4}}, {}, ("parallel_draft_step 4",)),
        ({"eagle_config": {"eh_proj_bias": True}}, {}, ("eh_proj_bias",)),
        ({"eagle_config": {"parallel_draft_heads_num_layers": 2}}, {}, ("parallel_draft_heads_num_layers 2",)),
        ({"eagle_config": {"use_last_layernorm": False}}, {}, ("use_last_layernorm false",)),
        ({"eagle_config": {"use_input_layernorm_in_first_layer": False}}, {}, ("use_input_layernorm",)),
        ({"architectures": ["EagleLlamaForCausalLM"]}, {}, ("EAGLE-1",)),
        ({"architectures": ["GPT2LMHeadModel"]}, {}, ("expected LlamaForCausalLMEagle3", "GPT2LMHeadModel")),
        ({"architectures": ["LlamaForCausalLM"]}, {}, ("found 'LlamaForCausalLM'", "those of an EAGLE-3 draft")),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, ("MLA",)),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, {}, ("P-EAGLE",)),
        ({"dflash_config": {"mask_token_id": 5}}, {}, ("dflash_config", "DFlash")),
        ({"medusa_num_heads": 4}, {}, ("medusa_num_heads", "Medusa")),
        ({"architectures": None}, {}, ("architectures: expected", "found None")),
        ({}, {"layers__0__self_attn__kv_a_proj_with_mqa__weight": torch.zeros(8)}, ("MLA",)),
        ({}, {"parallel_draft_heads__0__weight": torch.zeros(8)}, ("parallel draft heads",)),
        ({}, {"layers__0__mlp__experts__0__up_proj__weight": torch.zeros(8)}, ("mixture of experts",)),
        ({}, {"mask_hidden": torch.zeros(192)}, ("mask_hidden", "P-EAGLE")),
        ({}, {"enorm__weight": torch.zeros(64)}, ("enorm.weight", "EAGLE-1")),
        ({}, {"layers__0__mlp__up_proj__weight_scale": torch.zeros(1)}, ("weight_scale", "quantised")),
    ],
    ids=str,
)
def test_other_kinds_of_drafts_are_refused_by_name(tmp_path, target, config, tensors, parts):
    directory = write_tiny_draft(tmp_path, **config)
    assert_fault(faults_of(edit(directory, **tensors), target), *parts)


def test_several_signs_of_another_kind_are_all_named(tmp_path, target):
    lines = faults_of(write_tiny_draft(tmp_path, kv_lora_rank=8, mask_token_id=3), target)
    assert_fault(lines, "MLA")
    assert_fault(lines, "P-EAGLE")


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        ({"model_type": "mistral"}, ("transformer_layer_config.model_type: expected llama or qwen3", "'mistral'")),
        ({}, ("model_type", "found None")),
        ({"model_type": "llama", "kv_lora_rank": 8}, ("transformer_layer_config.kv_lora_rank 8", "MLA")),
        ("llama", ("transformer_layer_config: expected an object",)),
    ],
    ids=str,
)
def test_layers_that_speculators_has_and_this_service_has_not(tmp_path, target, layer, parts):
    directory = edit_config(write_tiny_draft(tmp_path, layout="B"), transformer_layer_config=layer)
    assert_fault(faults_of(directory, target), *parts)


def test_the_targets_quantisation_in_a_layers_config_is_not_the_drafts(tmp_path, target):
    layer = {"quantization_config": {"quant_method": "mxfp4"}}
    directory = write_tiny_draft(tmp_path, layout="B")
    config = json.loads((directory / "config.json").read_text())
    edit_config(directory, transformer_layer_config={**config["transformer_layer_config"], **layer})
    resolve(directory, target)
    edit(directory, layers__0__mlp__up_proj__weight=torch.zeros(96, 64).to(torch.float8_e4m3fn))
    assert_fault(faults_of(directory, target), "up_proj.weight", "float8_e4m3fn")


def test_a_pickle_is_refused_with_a_hint(tmp_path, target):
    directory = write_tiny_draft(tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert_fault(faults_of(directory, target), "pytorch_model.bin is a pickle", "convert")
