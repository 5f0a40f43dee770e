"""What the families have in common: attention, dense feed-forward, what stands outside the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels.attention_block import AttentionBlock
from kernels.linear import PackedWeight, pack_weight
from kernels.mlp_block import MlpBlock
from kernels.rope import RotaryTable
from outrider.checkpoint import Checkpoint, CheckpointError
from target_service.models.config import ModelConfig, positive, wrong
from target_service.models.decoder import EMBEDDING, HEAD, DecoderLayer, Model
from target_service.models.weights import Weights

Shapes = dict[str, tuple[int, ...]]

FULL, SLIDING = "full_attention", "sliding_attention"

# Chains may reach past the longest sequence.
_POSITION_MARGIN = 256


def rotary_table(weights: Weights, config: ModelConfig, settings: Mapping[str, Any] | None = None) -> RotaryTable:
    """The table that config.json asks for. Raises CheckpointError for a scaling that is not known."""
    checkpoint = weights.checkpoint
    try:
        return RotaryTable(
            settings or checkpoint.config, config.max_position_embeddings + _POSITION_MARGIN, weights.device
        )
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.directory / 'config.json'}: {error}") from None


def attention(
    weights: Weights,
    config: ModelConfig,
    rotary: RotaryTable,
    prefix: str,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> AttentionBlock:
    """Loads the attention half of the layer whose names begin with `prefix`; all families name it alike."""
    stem = f"{prefix}self_attn."
    return AttentionBlock(
        norm=weights(f"{prefix}input_layernorm.weight"),
        eps=config.rms_norm_eps,
        qkv=weights.linear(*(f"{stem}{name}_proj" for name in "qkv")),
        output=weights.linear(f"{stem}o_proj"),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary=rotary,
        window=window,
        sinks=sinks,
        q_norm=weights.optional(f"{stem}q_norm.weight"),
        k_norm=weights.optional(f"{stem}k_norm.weight"),
    )


def dense(weights: Weights, config: ModelConfig, prefix: str) -> MlpBlock:
    """Loads a dense feed-forward half."""
    mlp = f"{prefix}mlp."
    return MlpBlock(
        norm=weights(f"{prefix}post_attention_layernorm.weight"),
        eps=config.rms_norm_eps,
        gate_up=weights.linear(f"{mlp}gate_proj", f"{mlp}up_proj"),
        down=weights.linear(f"{mlp}down_proj"),
    )


def assemble(weights: Weights, config: ModelConfig, layers: list[DecoderLayer]) -> Model:
    """Loads what stands outside the layers, and puts the model together."""
    embedding = weights.shareable(EMBEDDING)
    head, norm = _head(weights, config, embedding), weights("model.norm.weight")
    return Model(config, weights.checkpoint, embedding, layers, norm, head, weights.shared)


def _head(weights: Weights, config: ModelConfig, embedding: torch.Tensor) -> PackedWeight:
    if config.tie_word_embeddings:
        return pack_weight(embedding)
    head = pack_weight(weights.shareable(HEAD))
    weights.checkpoint.release(HEAD)
    return head


def expected_attention(config: ModelConfig, prefix: str, bias: bool, head_norms: bool = False) -> Shapes:
    """Names and shapes of one layer's norms and attention projections."""
    hidden = config.hidden_size
    shapes: Shapes = {
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
    if head_norms:
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes


def expected_gated(prefix: str, hidden: int, intermediate: int, bias: bool = False) -> Shapes:
    """Names and shapes of a gated feed-forward, dense or one expert."""
    shapes: Shapes = {}
    for name, rows, columns in (
        ("gate_proj", intermediate, hidden),
        ("up_proj", intermediate, hidden),
        ("down_proj", hidden, intermediate),
    ):
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def expected_outside_layers(checkpoint: Checkpoint, config: ModelConfig) -> Shapes:
    """Names and shapes of embedding, final norm and head. A tied head may be stored again."""
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {EMBEDDING: table, "model.norm.weight": (config.hidden_size,)}
    if not config.tie_word_embeddings or HEAD in checkpoint.tensors:
        shapes[HEAD] = table
    return shapes


def windows(checkpoint: Checkpoint, config: ModelConfig, default: list[str]) -> list[int | None]:
    """Each layer's sliding window, None for full attention, by `layer_types` or else `default`."""
    types = checkpoint.config.get("layer_types") or default
    if len(types) != config.num_layers or not set(types) <= {SLIDING, FULL}:
        raise wrong(checkpoint, "layer_types", f"{config.num_layers} of {SLIDING} and {FULL}", types)
    window = positive(checkpoint, "sliding_window", 128) if SLIDING in types else None
    return [window if kind == SLIDING else None for kind in types]


def refuse_quantization(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a family whose quantised forms are not read here."""
    if checkpoint.config.get("quantization_config"):
        found = checkpoint.config["quantization_config"]
        raise wrong(checkpoint, "quantization_config", "none for this architecture", found)
