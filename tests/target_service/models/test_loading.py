"""What is read from a checkpoint beside its weights, and how one that does not fit is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.checkpoint import CheckpointError
from target_service.models import load_model
from tests.models import write_tiny_gpt_oss, write_tiny_llama, write_tiny_qwen3


def _edit_config(directory, file="config.json", **changes):
    path = directory / file
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def _edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_config(tmp_path):
    model = load_model(write_tiny_llama(tmp_path))
    config = model.config
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("LlamaForCausalLM", 320, 64)
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (2048, False)
    assert config.eos_token_ids == (1,)
    assert config.dtype == torch.float32
    assert model.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
    cache = model.new_kv_cache(3)
    assert cache.num_bytes == 3 * cache.page_size * model.kv_bytes_per_token


def test_end_tokens_come_from_the_generation_config_first(tmp_path):
    write_tiny_llama(tmp_path)
    _edit_config(tmp_path, "generation_config.json", eos_token_id=[5, 3])
    assert load_model(tmp_path).config.eos_token_ids == (5, 3)
    (tmp_path / "generation_config.json").unlink()
    assert load_model(tmp_path).config.eos_token_ids == (1,)
    _edit_config(tmp_path, eos_token_id=None)
    assert load_model(tmp_path).config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
        (torch.float16, "auto", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype(tmp_path, stored, asked, expected):
    model = load_model(write_tiny_llama(tmp_path, dtype=stored), dtype=asked)
    assert model.config.dtype == expected
    assert model.new_kv_cache(1).layers[0].keys.dtype == expected
    assert model.embed_weight.dtype == stored, "the embedding is given away as it is stored"


@pytest.mark.parametrize("tied", [True, False])
def test_shared_weights_are_as_stored(tmp_path, tied):
    model = load_model(write_tiny_llama(tmp_path, tie_word_embeddings=tied))
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(model.embed_weight, tensors["model.embed_tokens.weight"])
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(model.head_weight, tensors[head])


def test_shards_and_old_buffers_change_nothing(tmp_path):
    whole = write_tiny_llama(tmp_path / "whole")
    sharded = write_tiny_llama(tmp_path / "sharded", shards=3)
    _edit_tensors(
        whole, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    rows = torch.randn(2, 64)
    assert torch.equal(load_model(whole).logits(rows), load_model(sharded).logits(rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures: expected one of LlamaForCausalLM, GptOss",
        ),
        ({"architectures": None}, "architectures: expected one of"),
        ({"hidden_size": None}, "hidden_size: expected a positive integer, found None"),
        ({"vocab_size": -3}, "vocab_size: expected a positive integer, found -3"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads 8, found 3"),
        ({"head_dim": 15}, "head_dim: expected an even number, found 15"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, found 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: expected none for this architecture"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "config.json: rope scaling: expected 'original_max_"),
    ],
)
def test_refuses_a_config(tmp_path, changes, message):
    write_tiny_llama(tmp_path)
    _edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_refuses_an_unknown_dtype_and_rope(tmp_path):
    write_tiny_llama(tmp_path)
    with pytest.raises(ValueError, match="dtype: expected auto, float32 or bfloat16"):
        load_model(tmp_path, dtype="float16")
    _edit_config(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match="rope_type: expected default"):
        load_model(tmp_path)


def test_one_list_of_every_fault(tmp_path):
    def damage(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.4.extra"] = torch.zeros(2)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 64)

    _edit_tensors(write_tiny_llama(tmp_path), damage)
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path)
    text = str(error.value)
    assert "3 tensors do not fit config.json" in text
    assert "missing model.norm.weight [64]" in text
    assert "left over model.layers.4.extra [2]" in text
    assert "model.layers.1.mlp.up_proj.weight: expected [160, 64], found [3, 64] in model.safetensors" in text


def test_one_list_of_every_fault_of_a_mixture(tmp_path):
    def damage(tensors):
        del tensors["model.layers.1.mlp.experts.7.down_proj.weight"]
        del tensors["model.layers.0.self_attn.k_norm.weight"]
        tensors["model.layers.0.mlp.experts.8.up_proj.weight"] = torch.zeros(48, 64)
        tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(8, 63)
        tensors["model.layers.2.mlp.gate.weight"] = torch.zeros(8, 64, dtype=torch.int8)

    _edit_tensors(write_tiny_qwen3(tmp_path, mixture=True), damage)
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path)
    text = str(error.value)
    assert "5 tensors do not fit config.json" in text
    assert "missing model.layers.1.mlp.experts.7.down_proj.weight [64, 48]" in text
    assert "missing model.layers.0.self_attn.k_norm.weight [32]" in text
    assert "left over model.layers.0.mlp.experts.8.up_proj.weight [48, 64]" in text
    assert "model.layers.0.mlp.gate.weight: expected [8, 64], found [8, 63] in model.safetensors" in text
    assert "model.layers.2.mlp.gate.weight: expected floats of 16 bits or more, found torch.int8" in text


def test_refuses_packed_experts_that_are_not_bytes_or_not_numbers(tmp_path):
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    _edit_tensors(
        write_tiny_gpt_oss(tmp_path / "floats", num_hidden_layers=2),
        lambda tensors: tensors.update({scales: tensors[scales].float()}),
    )
    with pytest.raises(CheckpointError, match=f"{scales}: expected uint8, found torch.float32"):
        load_model(tmp_path / "floats")
    _edit_tensors(
        write_tiny_gpt_oss(tmp_path / "nan", num_hidden_layers=2), lambda tensors: tensors[scales][3].fill_(255)
    )
    with pytest.raises(CheckpointError, match=f"{scales}: MXFP4: expected scales up to 254, found 255"):
        load_model(tmp_path / "nan")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": None}, "head_dim: expected a positive integer, found None"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: expected at most num_experts 8, found 9"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: expected a positive integer, found None"),
        ({"mlp_only_layers": [0]}, "missing model.layers.0.mlp.gate_proj.weight"),
        ({"decoder_sparse_step": 2}, "missing model.layers.0.mlp.gate_proj.weight"),
        ({"use_sliding_window": True, "sliding_window": "wide"}, "sliding_window: expected a positive integer"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "left over model.layers.0.mlp.experts.0.down_proj.weight"),
    ],
)
def test_refuses_a_qwen3_config(tmp_path, changes, message):
    write_tiny_qwen3(tmp_path, mixture=True)
    _edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types: expected 2 of sliding_attention and full_attention"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types: expected 2 of"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method: expected mxfp4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: expected at most num_local_experts 8, found 9"),
        ({"quantization_config": None}, "missing model.layers.0.mlp.experts.gate_up_proj "),
        ({"sliding_window": "wide"}, "sliding_window: expected a positive integer"),
    ],
)
def test_refuses_a_gpt_oss_config(tmp_path, changes, message):
    write_tiny_gpt_oss(tmp_path, num_hidden_layers=2)
    _edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_gpt_oss_defaults_are_the_published_ones(tmp_path):
    """YaRN, theta and layer types of the published config, where a file leaves them out."""
    spelled = write_tiny_gpt_oss(tmp_path / "spelled", mxfp4=False, num_hidden_layers=2)
    silent = write_tiny_gpt_oss(tmp_path / "silent", mxfp4=False, num_hidden_layers=2)
    _edit_config(
        silent, rope_scaling=None, rope_theta=None, layer_types=None, num_experts_per_tok=None, experts_per_token=3
    )
    first, second = load_model(spelled), load_model(silent)
    for one, other in zip(first._layers, second._layers, strict=True):
        assert torch.equal(one.attention.rotary.cos, other.attention.rotary.cos)
        assert one.attention.window == other.attention.window
        assert one.feed_forward.experts.top_k == other.feed_forward.experts.top_k
