"""Builds a decoder from a gpt-oss checkpoint (Hugging Face's GptOssForCausalLM).

Experts are stored in MXFP4 (`..._blocks`, `..._scales`: [E, outputs, inputs / 32, ...]), and stay packed in memory, or
as plain weights ([E, inputs, outputs]); gate and up rows are interleaved.
"""

from __future__ import annotations

import torch

from kernels import mxfp4
from kernels.moe import Experts
from kernels.moe_block import MoeBlock
from kernels.rope import RotaryTable
from outrider.checkpoint import Checkpoint
from target_service.models.config import ModelConfig, positive, wrong
from target_service.models.decoder import DecoderLayer, Model
from target_service.models.parts import (
    FULL,
    SLIDING,
    Shapes,
    assemble,
    attention,
    expected_attention,
    expected_outside_layers,
    rotary_table,
    windows,
)
from target_service.models.weights import Weights, check_tensors

_DEFAULT_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_DEFAULT_THETA = 150000.0
_DEFAULT_CONTEXT = 4096


def build_gpt_oss(checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> Model:
    """Checks the tensors and loads them."""
    check_tensors(checkpoint, expected_tensors(checkpoint, config))
    weights = Weights(checkpoint, device, config.dtype)
    rotary = rotary_table(weights, config, _rope_config(checkpoint))
    # By default every other layer slides, the first too.
    kinds = [(SLIDING, FULL)[index % 2] for index in range(config.num_layers)]
    layers = [
        _layer(weights, config, rotary, f"model.layers.{index}.", window)
        for index, window in enumerate(windows(checkpoint, config, kinds))
    ]
    return assemble(weights, config, layers)


def _layer(weights: Weights, config: ModelConfig, rotary: RotaryTable, prefix: str, window: int | None) -> DecoderLayer:
    sinks = weights.raw(f"{prefix}self_attn.sinks").float()
    checkpoint = weights.checkpoint
    stems = f"{prefix}mlp.experts.gate_up_proj", f"{prefix}mlp.experts.down_proj"
    packed = weights.packed_experts(*stems)
    gate_up, down = ([], []) if packed else (weights.experts(stem) for stem in stems)
    experts = Experts(
        router=weights.linear(f"{prefix}mlp.router"),
        gate_up=gate_up,
        down=down,
        top_k=_top_k(checkpoint),
        alpha=float(checkpoint.config.get("swiglu_alpha", 1.702)),
        limit=float(checkpoint.config.get("swiglu_limit", 7.0)),
        packed=packed,
    )
    feed_forward = MoeBlock(weights(f"{prefix}post_attention_layernorm.weight"), config.rms_norm_eps, experts)
    return DecoderLayer(attention(weights, config, rotary, prefix, window, sinks), feed_forward)


def _top_k(checkpoint: Checkpoint) -> int:
    """The published files spell the key in two ways."""
    return positive(checkpoint, "num_experts_per_tok", checkpoint.config.get("experts_per_token", 4))


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


def expected_tensors(checkpoint: Checkpoint, config: ModelConfig) -> Shapes:
    """Names and shapes of all tensors that config.json asks for."""
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
                shapes[f"{stem}_blocks"] = (experts, outputs, inputs // mxfp4.BLOCK, mxfp4.BLOCK // 2)
                shapes[f"{stem}_scales"] = (experts, outputs, inputs // mxfp4.BLOCK)
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
        if positive(checkpoint, key) % mxfp4.BLOCK:
            raise wrong(checkpoint, key, f"a multiple of {mxfp4.BLOCK}, as MXFP4 needs", checkpoint.config[key])
    return True
