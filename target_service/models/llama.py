"""Builds a decoder from a Llama checkpoint (Hugging Face's LlamaForCausalLM)."""

from __future__ import annotations

import torch

from outrider.checkpoint import Checkpoint
from target_service.models.config import ModelConfig
from target_service.models.decoder import DecoderLayer, Model
from target_service.models.parts import (
    Shapes,
    assemble,
    attention,
    dense,
    expected_attention,
    expected_gated,
    expected_outside_layers,
    refuse_quantization,
    rotary_table,
)
from target_service.models.weights import Weights, check_tensors


def build_llama(checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> Model:
    """Checks the tensors and loads them."""
    refuse_quantization(checkpoint)
    check_tensors(checkpoint, _expected_tensors(checkpoint, config))
    weights = Weights(checkpoint, device, config.dtype)
    rotary = rotary_table(weights, config)
    prefixes = [f"model.layers.{index}." for index in range(config.num_layers)]
    layers = [
        DecoderLayer(attention(weights, config, rotary, prefix), dense(weights, config, prefix)) for prefix in prefixes
    ]
    return assemble(weights, config, layers)


def _expected_tensors(checkpoint: Checkpoint, config: ModelConfig) -> Shapes:
    shapes = expected_outside_layers(checkpoint, config)
    attention_bias, mlp_bias = (bool(checkpoint.config.get(key, False)) for key in ("attention_bias", "mlp_bias"))
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes |= expected_attention(config, prefix, attention_bias)
        shapes |= expected_gated(f"{prefix}mlp.", config.hidden_size, config.intermediate_size, mlp_bias)
    return shapes
