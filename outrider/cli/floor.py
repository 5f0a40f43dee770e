"""What a step has to read from memory, by a model's config: with the bandwidth, the floor under its time.

Weights count once a step, however many rows it has; keys and values of every sequence count once; activations, tables
and what is written do not count. Experts count as if rows chose them independently and evenly: T rows of top k of E
touch E (1 - (1 - k / E) ** T) of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FLOAT = 2  # bfloat16
_MXFP4_BITS = 4.25  # a weight, with its share of a block's scale


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a step reads."""

    dense: float
    """Projections, router, norms, biases, and a draft's feed-forward."""
    head: float
    experts: float
    keys: float
    """Keys and values."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.head + self.experts + self.keys


def target_step(config: Mapping[str, Any], rows: int, context: int, streams: int = 1) -> StepBytes:
    """A step of gpt-oss that verifies `rows` rows, K + 1, of each of `streams` sequences of `context` tokens."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    experts, top_k = config["num_local_experts"], config["num_experts_per_tok"]
    qkv, width = (heads + 2 * config["num_key_value_heads"]) * config["head_dim"], heads * config["head_dim"]
    weights = qkv * hidden + width * hidden + experts * hidden
    biases = qkv + hidden + experts
    norms_and_sinks = 2 * hidden + heads
    touched = experts * (1 - (1 - top_k / experts) ** (rows * streams))
    positions = sum(
        min(config["sliding_window"], context) if kind == "sliding_attention" else context
        for kind in config["layer_types"]
    )
    return StepBytes(
        dense=_FLOAT * (layers * (weights + biases + norms_and_sinks) + hidden),
        head=_FLOAT * config["vocab_size"] * hidden,
        experts=layers * touched * expert_bytes(config),
        keys=streams * positions * _key_bytes(config),
    )


def expert_bytes(config: Mapping[str, Any]) -> float:
    """One expert: gate, up and down in MXFP4, their biases in bfloat16."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    return 3 * hidden * intermediate * _MXFP4_BITS / 8 + _FLOAT * (2 * intermediate + hidden)


def draft_step(config: Mapping[str, Any], context: int, streams: int = 1) -> StepBytes:
    """One step of a chain of an EAGLE-3 draft of one layer, without fc."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    qkv, width = (heads + 2 * config["num_key_value_heads"]) * config["head_dim"], heads * config["head_dim"]
    weights = qkv * 2 * hidden + width * hidden + 3 * config["intermediate_size"] * hidden
    return StepBytes(
        dense=_FLOAT * (weights + 4 * hidden),
        head=_FLOAT * config["draft_vocab_size"] * hidden,
        experts=0,
        keys=streams * context * _key_bytes(config),
    )


def draft_round(config: Mapping[str, Any], chain: int, context: int, streams: int = 1) -> float:
    """A round of a draft: fc once, for three states of the target, and `chain` steps; nothing where it is 0."""
    fc = _FLOAT * 3 * config["hidden_size"] ** 2
    return fc + chain * draft_step(config, context, streams).total if chain else 0.0


def _key_bytes(config: Mapping[str, Any]) -> int:
    """Key and value of one position in one layer."""
    return 2 * _FLOAT * config["num_key_value_heads"] * config["head_dim"]
