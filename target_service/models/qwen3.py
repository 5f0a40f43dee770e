"""Builds a decoder from a Qwen3 checkpoint (Hugging Face's Qwen3ForCausalLM and Qwen3MoeForCausalLM).

Query and key heads are normalised before they are turned. Of the mixture's layers some may be dense; experts are stored
one by one, or stacked as transformers holds them (save_original_format=False).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.moe import Experts
from kernels.moe_block import MoeBlock
from outrider.checkpoint import Checkpoint
from target_service.models.config import ModelConfig, positive, wrong
from target_service.models.decoder import DecoderLayer, Model
from target_service.models.parts import (
    FULL,
    SLIDING,
    Shapes,
    assemble,
    attention,
    dense,
    expected_attention,
    expected_gated,
    expected_outside_layers,
    refuse_quantization,
    rotary_table,
    windows,
)
from target_service.models.weights import Weights, check_tensors


@dataclass(frozen=True)
class Mixture:
    """What config.json says of the experts, and which layers have them."""

    count: int
    top_k: int
    intermediate_size: int
    normalize: bool
    layers: frozenset[int]


def build_qwen3(checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> Model:
    """Checks the tensors and loads them."""
    refuse_quantization(checkpoint)
    # Without the key the family's width is not what follows from the hidden size.
    positive(checkpoint, "head_dim")
    mixture = _mixture(checkpoint, config)
    check_tensors(checkpoint, _expected_tensors(checkpoint, config, mixture))
    weights = Weights(checkpoint, device, config.dtype)
    rotary = rotary_table(weights, config)
    layers = []
    for index, window in enumerate(_windows(checkpoint, config)):
        prefix = f"model.layers.{index}."
        first_half = attention(weights, config, rotary, prefix, window)
        sparse = index in mixture.layers
        second_half = _sparse(weights, config, prefix, mixture) if sparse else dense(weights, config, prefix)
        layers.append(DecoderLayer(first_half, second_half))
    return assemble(weights, config, layers)


def _sparse(weights: Weights, config: ModelConfig, prefix: str, mixture: Mixture) -> MoeBlock:
    gate_up, down = _stacked(prefix)
    if gate_up in weights:
        packed = weights.stacked(gate_up, interleave=True), weights.stacked(down)
    else:
        stems = [f"{prefix}mlp.experts.{expert}." for expert in range(mixture.count)]
        packed = (
            [weights.interleaved(f"{stem}gate_proj", f"{stem}up_proj") for stem in stems],
            [weights.linear(f"{stem}down_proj") for stem in stems],
        )
    experts = Experts(
        router=weights.linear(f"{prefix}mlp.gate"),
        gate_up=packed[0],
        down=packed[1],
        top_k=mixture.top_k,
        alpha=1.0,
        limit=math.inf,
        offset=0.0,
        normalize=mixture.normalize,
    )
    return MoeBlock(weights(f"{prefix}post_attention_layernorm.weight"), config.rms_norm_eps, experts)


def _stacked(prefix: str) -> tuple[str, str]:
    """Names of all experts' gate and up projections, and of their down projections, where they are stacked."""
    return f"{prefix}mlp.experts.gate_up_proj", f"{prefix}mlp.experts.down_proj"


def _mixture(checkpoint: Checkpoint, config: ModelConfig) -> Mixture:
    """Every decoder_sparse_step-th layer has experts, but for those listed in mlp_only_layers."""
    if config.architecture != "Qwen3MoeForCausalLM":
        return Mixture(0, 0, 0, False, frozenset())
    # transformers 5 writes num_local_experts.
    count = positive(checkpoint, "num_experts", checkpoint.config.get("num_local_experts"))
    top_k = positive(checkpoint, "num_experts_per_tok")
    if top_k > count:
        raise wrong(checkpoint, "num_experts_per_tok", f"at most num_experts {count}", top_k)
    step = positive(checkpoint, "decoder_sparse_step", 1)
    dense_layers = checkpoint.config.get("mlp_only_layers") or []
    sparse = frozenset(layer for layer in range(config.num_layers) if (layer + 1) % step == 0) - frozenset(dense_layers)
    normalize = bool(checkpoint.config.get("norm_topk_prob", False))
    return Mixture(count, top_k, positive(checkpoint, "moe_intermediate_size"), normalize, sparse)


def _windows(checkpoint: Checkpoint, config: ModelConfig) -> list[int | None]:
    """Windows count only where use_sliding_window is set: in a mixture in all layers, else by layer_types."""
    if not checkpoint.config.get("use_sliding_window"):
        return [None] * config.num_layers
    if config.architecture == "Qwen3MoeForCausalLM":
        return [positive(checkpoint, "sliding_window", 4096)] * config.num_layers
    first = checkpoint.config.get("max_window_layers", 28)
    return windows(checkpoint, config, [SLIDING if index >= first else FULL for index in range(config.num_layers)])


def _expected_tensors(checkpoint: Checkpoint, config: ModelConfig, mixture: Mixture) -> Shapes:
    shapes = expected_outside_layers(checkpoint, config)
    hidden, bias = config.hidden_size, bool(checkpoint.config.get("attention_bias", False))
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes |= expected_attention(config, prefix, bias, head_norms=True)
        if index not in mixture.layers:
            shapes |= expected_gated(f"{prefix}mlp.", hidden, config.intermediate_size)
            continue
        shapes[f"{prefix}mlp.gate.weight"] = (mixture.count, hidden)
        gate_up, down = _stacked(prefix)
        if gate_up in checkpoint.tensors:
            shapes[gate_up] = (mixture.count, 2 * mixture.intermediate_size, hidden)
            shapes[down] = (mixture.count, hidden, mixture.intermediate_size)
            continue
        for expert in range(mixture.count):
            shapes |= expected_gated(f"{prefix}mlp.experts.{expert}.", hidden, mixture.intermediate_size)
    return shapes
