"""Tiny checkpoints with random weights: real Hugging Face directories, the same bytes for the same seed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tokenizer_files import BOS_ID, EOS_ID, TOKENIZER_SIZE, write_harmony_tokenizer, write_tokenizer


def write_tiny_llama(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shards: int = 1,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Writes a Llama checkpoint of about 0.2 M weights; `overrides` go into config.json. Returns the directory."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": TOKENIZER_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **overrides,
    }
    random = _Random(seed, dtype)
    tensors = _decoder_tensors(config, random)
    for layer in range(config["num_hidden_layers"]):
        stem, sizes = f"model.layers.{layer}.mlp.", (config["hidden_size"], config["intermediate_size"])
        tensors |= _gated(random, stem, *sizes, bias=config["mlp_bias"])
    return _write(Path(directory), config, tensors, dtype, shards, tokenizer)


def write_tiny_gpt_oss(
    directory: str | Path,
    *,
    mxfp4: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    shards: int = 1,
    tokenizer: bool = True,
    harmony: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a gpt-oss checkpoint, experts in MXFP4 under the published names or in `dtype`. Returns the directory.

    `harmony`: with a tokenizer that has harmony's special tokens, and its end tokens in generation_config.json.
    """
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": TOKENIZER_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 48,
        "max_position_embeddings": 2048,
        "initial_context_length": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        **overrides,
    }
    layers = config["num_hidden_layers"]
    config.setdefault("layer_types", [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)])
    if mxfp4:
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    random = _Random(seed, dtype)
    tensors = _decoder_tensors(config, random)
    for layer in range(layers):
        tensors |= _gpt_oss_layer(config, random, f"model.layers.{layer}.", mxfp4)
    written = _write(Path(directory), config, tensors, dtype, shards, tokenizer and not harmony)
    if harmony:
        write_harmony_tokenizer(written)
    return written


def write_tiny_qwen3(
    directory: str | Path,
    *,
    mixture: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shards: int = 1,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Writes a Qwen3 checkpoint, dense or with a mixture of experts. Returns the directory."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if mixture else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if mixture else "qwen3",
        "vocab_size": TOKENIZER_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "eos_token_id": EOS_ID,
    }
    if mixture:
        config |= {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    config |= overrides
    random = _Random(seed, dtype)
    tensors = _decoder_tensors(config, random)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = random.norm(config["head_dim"])
        if not mixture or layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"]:
            tensors |= _gated(random, f"{prefix}mlp.", config["hidden_size"], config["intermediate_size"])
            continue
        tensors[f"{prefix}mlp.gate.weight"] = random.matrix(config["num_experts"], config["hidden_size"])
        for expert in range(config["num_experts"]):
            stem = f"{prefix}mlp.experts.{expert}."
            tensors |= _gated(random, stem, config["hidden_size"], config["moe_intermediate_size"])
    return _write(Path(directory), config, tensors, dtype, shards, tokenizer)


class _Random:
    """Random tensors of one dtype from one seed, scaled so that a few layers keep activations near 1."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def matrix(self, *shape: int) -> torch.Tensor:
        return (self.normal(*shape) * shape[-1] ** -0.5).to(self._dtype)

    def vector(self, *shape: int) -> torch.Tensor:
        return (self.normal(*shape) * 0.2).to(self._dtype)

    def norm(self, size: int) -> torch.Tensor:
        return (1 + self.normal(size) * 0.1).to(self._dtype)

    def bytes(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator, dtype=torch.uint8)


def _decoder_tensors(config: dict[str, Any], random: _Random) -> dict[str, torch.Tensor]:
    """Embedding, head, norms and attention projections, which all families share."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width = config["head_dim"]
    tensors = {
        "model.embed_tokens.weight": random.normal(config["vocab_size"], hidden).to(random.matrix(1, 1).dtype),
        "model.norm.weight": random.norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random.matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = random.norm(hidden)
        tensors[f"{prefix}post_attention_layernorm.weight"] = random.norm(hidden)
        for name, rows, columns in (
            ("q_proj", heads * width, hidden),
            ("k_proj", kv_heads * width, hidden),
            ("v_proj", kv_heads * width, hidden),
            ("o_proj", hidden, heads * width),
        ):
            tensors[f"{prefix}self_attn.{name}.weight"] = random.matrix(rows, columns)
            if config["attention_bias"]:
                tensors[f"{prefix}self_attn.{name}.bias"] = random.vector(rows)
    return tensors


def _gated(random: _Random, stem: str, hidden: int, intermediate: int, bias: bool = False) -> dict[str, torch.Tensor]:
    """A gated feed-forward, dense or one expert."""
    tensors = {}
    for name, rows, columns in (
        ("gate_proj", intermediate, hidden),
        ("up_proj", intermediate, hidden),
        ("down_proj", hidden, intermediate),
    ):
        tensors[f"{stem}{name}.weight"] = random.matrix(rows, columns)
        if bias:
            tensors[f"{stem}{name}.bias"] = random.vector(rows)
    return tensors


def _gpt_oss_layer(config: dict[str, Any], random: _Random, prefix: str, mxfp4: bool) -> dict[str, torch.Tensor]:
    hidden, intermediate, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    tensors = {
        f"{prefix}self_attn.sinks": random.normal(config["num_attention_heads"]).to(random.matrix(1, 1).dtype),
        f"{prefix}mlp.router.weight": random.matrix(experts, hidden),
        f"{prefix}mlp.router.bias": random.vector(experts),
    }
    for name, outputs, inputs in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
        stem = f"{prefix}mlp.experts.{name}"
        tensors[f"{stem}_bias"] = random.vector(experts, outputs)
        if mxfp4:
            tensors[f"{stem}_blocks"] = random.bytes(0, 256, experts, outputs, inputs // 32, 16)
            # Around 2**-4 for small widths: values of magnitude near 1 / sqrt(inputs).
            low = 124 - round(math.log2(inputs) / 2)
            tensors[f"{stem}_scales"] = random.bytes(low, low + 4, experts, outputs, inputs // 32)
        else:
            tensors[stem] = random.matrix(experts, outputs, inputs).transpose(1, 2).contiguous()
    return tensors


def _write(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    shards: int,
    tokenizer: bool,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    write_tensors(directory, tensors, shards)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Writes one safetensors file, or several with their index."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
