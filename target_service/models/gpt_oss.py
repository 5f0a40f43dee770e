"""Builds a decoder from a gpt-oss checkpoint (Hugging Face's GptOssForCausalLM).

Experts are stored in MXFP4 (`..._blocks`, `..._scales`: [E, outputs, inputs / 32, ...]) and dequantised here, or as
plain weights ([E, inputs, outputs]); gate and up rows are interleaved.
"""

from __future__ import annotations

import torch

from kernels.linear import PackedWeight, pack_weight
from kernels.moe import Experts
from kernels.moe_block import MoeBlock
from kernels.mxfp4 import dequantize_mxfp4
from kernels.rope import RotaryTable
from outrider.checkpoint import Checkpoint
from target_service.models.config import ModelConfig, positive, wrong
from target_service.models.decoder import EMBEDDING, HEAD, DecoderLayer, Model
from target_service.models.llama import POSITION_MARGIN, attention, expected_attention, expected_outside_layers
from target_service.models.weights import Weights, check_tensors

_MXFP4_BLOCK = 32
_DEFAULT_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_DEFAULT_THETA = 150000.0
_DEFAULT_CONTEXT = 4096


def build_gpt_oss(checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> Model:
    """Checks the tensors and loads them."""
    check_tensors(checkpoint, _expected_tensors(checkpoint, config))
    weights = Weights(checkpoint, device, config.dtype)
    rotary = RotaryTable(_rope_config(checkpoint), config.max_position_embeddings + POSITION_MARGIN, device)
    embedding = weights(EMBEDDING)
    layers = [
        _layer(weights, config, rotary, f"model.layers.{index}.", window)
        for index, window in enumerate(_windows(checkpoint, config))
    ]
    head = embedding if config.tie_word_embeddings else weights(HEAD)
    return Model(config, checkpoint, embedding, layers, weights("model.norm.weight"), pack_weight(head))


def _layer(weights: Weights, config: ModelConfig, rotary: RotaryTable, prefix: str, window: int | None) -> DecoderLayer:
    sinks = weights.raw(f"{prefix}self_attn.sinks").float()
    checkpoint = weights.checkpoint
    experts = Experts(
        router=pack_weight(weights(f"{prefix}mlp.router.weight"), weights(f"{prefix}mlp.router.bias")),
        gate_up=_expert_weights(weights, f"{prefix}mlp.experts.gate_up_proj"),
        down=_expert_weights(weights, f"{prefix}mlp.experts.down_proj"),
        top_k=_top_k(checkpoint),
        alpha=float(checkpoint.config.get("swiglu_alpha", 1.702)),
        limit=float(checkpoint.config.get("swiglu_limit", 7.0)),
    )
    feed_forward = MoeBlock(weights(f"{prefix}post_attention_layernorm.weight"), config.rms_norm_eps, experts)
    return DecoderLayer(attention(weights, config, rotary, prefix, window, sinks), feed_forward)


def _expert_weights(weights: Weights, stem: str) -> list[PackedWeight]:
    """One packed weight [outputs, inputs] per expert."""
    if f"{stem}_blocks" in weights:
        matrices = dequantize_mxfp4(weights.raw(f"{stem}_blocks"), weights.raw(f"{stem}_scales"), weights.dtype)
    else:
        matrices = weights(stem).transpose(1, 2)
    return [pack_weight(matrix, bias) for matrix, bias in zip(matrices, weights(f"{stem}_bias"), strict=True)]


def _top_k(checkpoint: Checkpoint) -> int:
    """The published files spell the key in two ways."""
    return positive(checkpoint, "num_experts_per_tok", checkpoint.config.get("experts_per_token", 4))


def _windows(checkpoint: Checkpoint, config: ModelConfig) -> list[int | None]:
    """Each layer's sliding window, None for full attention; by default every other layer slides, the first too."""
    default = [("sliding_attention", "full_attention")[index % 2] for index in range(config.num_layers)]
    types = checkpoint.config.get("layer_types") or default
    if len(types) != config.num_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        expected = f"{config.num_layers} of sliding_attention and full_attention"
        raise wrong(checkpoint, "layer_types", expected, types)
    window = positive(checkpoint, "sliding_window", 128)
    return [window if kind == "sliding_attention" else None for kind in types]


def _rope_config(checkpoint: Checkpoint) -> dict[str, object]:
    config = checkpoint.config
    if config.get("rope_parameters") or config.get("rope_scaling"):
        return {"rope_theta": _DEFAULT_THETA, **config}
    original = config.get("initial_context_length", _DEFAULT_CONTEXT)
    return {
        "rope_theta": _DEFAULT_THETA,
        **config,
        "rope_scaling": {**_DEFAULT_ROPE, "original_max_position_embeddings": original},
    }


def _expected_tensors(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = expected_outside_layers(checkpoint, config)
    experts = positive(checkpoint, "num_local_experts", checkpoint.config.get("num_experts"))
    if _top_k(checkpoint) > experts:
        raise wrong(checkpoint, "num_experts_per_tok", f"at most num_local_experts {experts}", _top_k(checkpoint))
    quantized = _is_mxfp4(checkpoint)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes |= expected_attention(config, prefix, bool(checkpoint.config.get("attention_bias", True)))
        shapes[f"{prefix}self_attn.sinks"] = (config.num_heads,)
        shapes[f"{prefix}mlp.router.weight"] = (experts, hidden)
        shapes[f"{prefix}mlp.router.bias"] = (experts,)
        for name, outputs, inputs in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
            stem = f"{prefix}mlp.experts.{name}"
            shapes[f"{stem}_bias"] = (experts, outputs)
            if quantized:
                shapes[f"{stem}_blocks"] = (experts, outputs, inputs // _MXFP4_BLOCK, _MXFP4_BLOCK // 2)
                shapes[f"{stem}_scales"] = (experts, outputs, inputs // _MXFP4_BLOCK)
            else:
                shapes[stem] = (experts, inputs, outputs)
    return shapes


def _is_mxfp4(checkpoint: Checkpoint) -> bool:
    quantization = checkpoint.config.get("quantization_config")
    if not quantization:
        return False
    if quantization.get("quant_method") != "mxfp4":
        raise wrong(checkpoint, "quantization_config.quant_method", "mxfp4", quantization.get("quant_method"))
    for key in ("hidden_size", "intermediate_size"):
        if positive(checkpoint, key) % _MXFP4_BLOCK:
            raise wrong(checkpoint, key, f"a multiple of {_MXFP4_BLOCK}, as MXFP4 needs", checkpoint.config[key])
    return True
