"""The normalised description of a draft: what every layout's config comes down to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from draft_service.faults import Faults
from kernels.rope import rotary_frequencies

log = logging.getLogger(__name__)

# Keys of a flat config that say how its rotary embedding turns.
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings")
_READ_EAGLE_KEYS = {
    "eagle_aux_hidden_state_layer_ids",
    "use_aux_hidden_state",
    "norm_before_fc",
    "norm_output",
    "return_hidden_post_norm",
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
    "eh_proj_before_attn",
    "eh_proj_bias",
    "parallel_draft_step",
    "parallel_draft_heads_num_layers",
}


@dataclass(frozen=True)
class DraftDescription:
    """A draft, whatever layout it came in."""

    layout: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_aux: int
    layer_ids: tuple[int, ...] | None
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool
    attention_bias: bool
    mlp_bias: bool
    logit_scale: float
    rope: Mapping[str, Any]
    max_position_embeddings: int | None

    @property
    def input_width(self) -> int:
        """Width of a row of hidden states: the captured states side by side."""
        return self.num_aux * self.target_hidden_size

    @property
    def reduced(self) -> bool:
        """Whether the draft proposes from a part of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def rope_summary(self) -> str:
        """Type, theta and factor of the rotary embedding, for logs."""
        scaling = self.rope.get("rope_parameters") or self.rope.get("rope_scaling") or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        theta = scaling.get("rope_theta") or self.rope.get("rope_theta") or 10000.0
        factor = f" factor {scaling['factor']:g}" if scaling.get("factor") else ""
        return f"{kind} theta {theta:g}{factor}"


def describe_flat(config: Mapping[str, Any], layout: str, faults: Faults) -> DraftDescription | None:
    """Reads a flat config (a Llama config with `eagle_config` inside). None, with faults, where it says too little."""
    read = _Reader(config, faults)
    hidden, heads, vocab = read.size("hidden_size"), read.size("num_attention_heads"), read.size("vocab_size")
    intermediate, kv_heads = read.size("intermediate_size"), read.size("num_key_value_heads")
    eps = read.number("rms_norm_eps")
    layer_ids = read.layer_ids()
    _check_layer_kind(config, faults)
    _warn_of_unread(read.nested)
    if not (hidden and heads and vocab and intermediate and kv_heads and eps):
        return None
    head_dim = read.size("head_dim", hidden // heads) or 0
    rope = {key: config[key] for key in _ROPE_KEYS if config.get(key) is not None} | {"head_dim": head_dim}
    description = DraftDescription(
        layout=layout,
        architecture=config["architectures"][0],
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=read.size("num_hidden_layers", 1) or 1,
        rms_norm_eps=eps,
        vocab_size=vocab,
        draft_vocab_size=read.size("draft_vocab_size", vocab) or vocab,
        target_hidden_size=read.size("target_hidden_size", hidden) or hidden,
        num_aux=read.size("num_aux_hidden_states", len(layer_ids) if layer_ids else 3) or 0,
        layer_ids=layer_ids,
        norm_before_fc=read.flag("norm_before_fc", "norm_before_fc"),
        fc_norm=read.flag("fc_norm"),
        norm_before_residual=read.flag("norm_before_residual"),
        norm_output=read.flag("norm_output", "norm_output", "return_hidden_post_norm"),
        attention_bias=read.flag("attention_bias"),
        mlp_bias=read.flag("mlp_bias"),
        logit_scale=read.number("logit_scale", 1.0) or 1.0,
        rope=rope,
        max_position_embeddings=read.size("max_position_embeddings", optional=True),
    )
    _check_sizes(description, config, faults)
    _check_rope(rope, faults)
    return description


class _Reader:
    """Reads keys of a config and of its `eagle_config`; what is wrong goes to the faults."""

    def __init__(self, config: Mapping[str, Any], faults: Faults) -> None:
        nested = config.get("eagle_config") or {}
        if not isinstance(nested, Mapping):
            faults.add(f"eagle_config: expected an object, found {nested!r:.60}")
            nested = {}
        self.config, self.nested, self.faults = config, nested, faults

    def size(self, key: str, default: int | None = None, *, optional: bool = False) -> int | None:
        """A positive integer; a missing one without a default is a fault unless `optional`."""
        value = self.config.get(key)
        if value is None:
            if default is None and not optional:
                self.faults.add(f"{key}: missing from config.json")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.faults.add(f"{key}: expected a positive integer, found {value!r}")
            return default
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A positive number; a missing one without a default is a fault."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                self.faults.add(f"{key}: missing from config.json")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.faults.add(f"{key}: expected a positive number, found {value!r}")
            return default
        return float(value)

    def flag(self, key: str, *nested_keys: str) -> bool:
        """A boolean of the top level or, under `nested_keys`, of eagle_config; they must not contradict."""
        found = {key: self.config.get(key)} | {f"eagle_config.{name}": self.nested.get(name) for name in nested_keys}
        found = {name: value for name, value in found.items() if value is not None}
        for name, value in found.items():
            if not isinstance(value, bool):
                self.faults.add(f"{name}: expected true or false, found {value!r}")
        if len(set(map(bool, found.values()))) > 1:
            self.faults.add(" and ".join(f"{name} {value}" for name, value in found.items()) + " contradict each other")
        return any(found.values())

    def layer_ids(self) -> tuple[int, ...] | None:
        """The captured layers as the file numbers them, in ascending order; None where it names none."""
        key = "eagle_aux_hidden_state_layer_ids"
        nested, top = self.nested.get(key), self.config.get(key)
        if nested and top and nested != top:
            self.faults.add(f"eagle_config.{key} {nested} and {key} {top} contradict each other")
        ids = nested or top
        if not ids:
            return None
        if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            self.faults.add(f"{key}: expected a list of integers, found {ids!r}")
            return None
        return tuple(sorted(ids))


def _check_layer_kind(config: Mapping[str, Any], faults: Faults) -> None:
    """Faults for layers that are not plain Llama ones, and for a tied head."""
    if config.get("hidden_act", "silu") != "silu":
        faults.add(f"hidden_act: expected 'silu', found {config['hidden_act']!r}")
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        faults.add(f"sliding_window {config['sliding_window']!r}: not supported, the draft attends to everything")
    if kinds := set(config.get("layer_types") or []) - {"full_attention"}:
        faults.add(f"layer_types {sorted(kinds)}: not supported, expected full_attention")
    if config.get("tie_word_embeddings"):
        faults.add("tie_word_embeddings true: not supported, the draft's head is its own or the target's")


def _check_sizes(draft: DraftDescription, config: Mapping[str, Any], faults: Faults) -> None:
    """Faults for sizes and flags that contradict each other."""
    hidden, heads, kv_heads = draft.hidden_size, draft.num_attention_heads, draft.num_key_value_heads
    if config.get("head_dim") is None and hidden % heads:
        faults.add(f"head_dim: missing, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if heads % kv_heads:
        faults.add(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
    if draft.draft_vocab_size > draft.vocab_size:
        faults.add(f"draft_vocab_size: {draft.draft_vocab_size} is larger than vocab_size {draft.vocab_size}")
    if draft.layer_ids and draft.num_aux != len(draft.layer_ids):
        ids = list(draft.layer_ids)
        faults.add(f"num_aux_hidden_states: {draft.num_aux}, but there are {len(ids)} layer ids {ids}")
    if draft.fc_norm and draft.norm_before_fc:
        faults.add("fc_norm and norm_before_fc are both true: engines disagree on what that means")


def _check_rope(rope: dict[str, Any], faults: Faults) -> None:
    try:
        frequencies, _ = rotary_frequencies(rope)
        if not torch.isfinite(frequencies).all():
            faults.add(f"rope: frequencies are not finite: {rope}")
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        faults.add(f"rope: {error}")


def _warn_of_unread(nested: Mapping[str, Any]) -> None:
    if unread := sorted(set(nested) - _READ_EAGLE_KEYS):
        log.warning("eagle_config: keys that change nothing here: %s", ", ".join(unread))
