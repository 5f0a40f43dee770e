"""Builds a decoder from a Llama checkpoint (Hugging Face's LlamaForCausalLM)."""

from __future__ import annotations

import torch

from kernels.attention_block import AttentionBlock
from kernels.linear import pack_weight
from kernels.mlp_block import MlpBlock
from kernels.rope import RotaryTable
from outrider.checkpoint import Checkpoint
from target_service.models.config import ModelConfig
from target_service.models.decoder import EMBEDDING, HEAD, DecoderLayer, Model
from target_service.models.weights import Weights, check_tensors

# Chains may reach past the longest sequence.
POSITION_MARGIN = 256


def build_llama(checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> Model:
    """Checks the tensors and loads them."""
    check_tensors(checkpoint, _expected_tensors(checkpoint, config))
    weights = Weights(checkpoint, device, config.dtype)
    rotary = RotaryTable(checkpoint.config, config.max_position_embeddings + POSITION_MARGIN, device)
    embedding = weights(EMBEDDING)
    layers = [_layer(weights, config, rotary, f"model.layers.{index}.") for index in range(config.num_layers)]
    head = embedding if config.tie_word_embeddings else weights(HEAD)
    return Model(config, checkpoint, embedding, layers, weights("model.norm.weight"), pack_weight(head))


def attention(
    weights: Weights,
    config: ModelConfig,
    rotary: RotaryTable,
    prefix: str,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> AttentionBlock:
    """Loads the attention half of the layer whose names begin with `prefix`; both families name it alike."""
    stem = f"{prefix}self_attn."
    projections = [f"{stem}{name}_proj" for name in "qkv"]
    biases = [weights(f"{name}.bias") for name in projections if f"{name}.bias" in weights]
    return AttentionBlock(
        norm=weights(f"{prefix}input_layernorm.weight"),
        eps=config.rms_norm_eps,
        qkv=pack_weight([weights(f"{name}.weight") for name in projections], biases or None),
        output=pack_weight(weights(f"{stem}o_proj.weight"), weights.optional(f"{stem}o_proj.bias")),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary=rotary,
        window=window,
        sinks=sinks,
    )


def expected_attention(config: ModelConfig, prefix: str, bias: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's norms and attention projections."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name, rows, columns in (
        ("q_proj", width, hidden),
        ("k_proj", kv_width, hidden),
        ("v_proj", kv_width, hidden),
        ("o_proj", hidden, width),
    ):
        shapes[f"{prefix}self_attn.{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}self_attn.{name}.bias"] = (rows,)
    return shapes


def expected_outside_layers(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of embedding, final norm and head. A tied head may be stored again."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table, "model.norm.weight": (config.hidden_size,)}
    if not config.tie_word_embeddings or HEAD in checkpoint.tensors:
        shapes[HEAD] = table
    return shapes


def _layer(weights: Weights, config: ModelConfig, rotary: RotaryTable, prefix: str) -> DecoderLayer:
    mlp = f"{prefix}mlp."
    biases = [weights(f"{mlp}{name}_proj.bias") for name in ("gate", "up") if f"{mlp}{name}_proj.bias" in weights]
    feed_forward = MlpBlock(
        norm=weights(f"{prefix}post_attention_layernorm.weight"),
        eps=config.rms_norm_eps,
        gate_up=pack_weight([weights(f"{mlp}{name}_proj.weight") for name in ("gate", "up")], biases or None),
        down=pack_weight(weights(f"{mlp}down_proj.weight"), weights.optional(f"{mlp}down_proj.bias")),
    )
    return DecoderLayer(attention(weights, config, rotary, prefix), feed_forward)


def _expected_tensors(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = expected_outside_layers(checkpoint, config)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes |= expected_attention(config, prefix, bool(checkpoint.config.get("attention_bias", False)))
        for name, rows, columns in (
            ("gate_proj", intermediate, hidden),
            ("up_proj", intermediate, hidden),
            ("down_proj", hidden, intermediate),
        ):
            shapes[f"{prefix}mlp.{name}.weight"] = (rows, columns)
            if checkpoint.config.get("mlp_bias", False):
                shapes[f"{prefix}mlp.{name}.bias"] = (rows,)
    return shapes
