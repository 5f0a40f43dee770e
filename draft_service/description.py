"""The normalised description of a draft: what every layout's config comes down to."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from draft_service.families import FLAT, SPECULATORS, count_layers
from draft_service.faults import Faults
from draft_service.reader import LAYER_IDS, Reader
from draft_service.rope import ROPE_KEYS, check_rope, summarise
from draft_service.windows import layer_windows

log = logging.getLogger(__name__)

# Drafts in the field have up to a handful of layers; beyond this a config is damaged.
_DEEPEST = 128
_READ_EAGLE_KEYS = {
    LAYER_IDS,
    "use_aux_hidden_state",
    "norm_before_fc",
    "fc_norm",
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
    """A draft, whatever layout it came in.

    family: FLAT or SPECULATORS, which decides how layer_ids are numbered. num_aux: target states side by side in a
    row; 1 without `use_aux`, the state after the target's final norm, which then is g as it stands, without fc.
    fc_bias and output_bias (of o_proj): None where only the tensors tell. windows: positions that each layer sees.
    """

    family: str
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
    use_aux: bool
    num_aux: int
    layer_ids: tuple[int, ...] | None
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool
    qk_norm: bool
    attention_bias: bool
    output_bias: bool | None
    mlp_bias: bool
    fc_bias: bool | None
    logit_scale: float
    rope: Mapping[str, Any]
    max_position_embeddings: int | None
    windows: tuple[int | None, ...]

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
        return summarise(self.rope)


def describe(
    config: Mapping[str, Any], family: str, tensor_names: Collection[str], faults: Faults
) -> DraftDescription | None:
    """Reads a flat config (a Llama config with `eagle_config` inside). None, with faults, where it says too little.

    `tensor_names` are canonical: some of a file's settings stand in its tensors only.
    """
    read = Reader(config, faults)
    hidden, heads, vocab = read.size("hidden_size"), read.size("num_attention_heads"), read.size("vocab_size")
    intermediate, kv_heads = read.size("intermediate_size"), read.size("num_key_value_heads")
    eps, depth = read.number("rms_norm_eps"), read.size("num_hidden_layers", 1) or 1
    use_aux = read.flag("use_aux_hidden_state", "use_aux_hidden_state", default=True)
    layer_ids = read.layer_ids()
    _check_layer_kind(config, read, depth, faults)
    _warn_of_unread(read.nested)
    if tensor_names and depth > (found := count_layers(tensor_names)):
        faults.add(f"num_hidden_layers: {depth}, but the file has tensors of {found}")
    if not (hidden and heads and vocab and intermediate and kv_heads and eps) or depth > _DEEPEST:
        return None
    head_dim = read.size("head_dim", hidden // heads) or 0
    num_states = read.size("num_aux_hidden_states", len(layer_ids) if layer_ids else 3) or 0
    attention_bias = read.flag("attention_bias")
    description = DraftDescription(
        family=family,
        architecture=config["architectures"][0],
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=depth,
        rms_norm_eps=eps,
        vocab_size=vocab,
        draft_vocab_size=read.size("draft_vocab_size", vocab) or vocab,
        target_hidden_size=read.size("target_hidden_size", hidden) or hidden,
        use_aux=use_aux,
        num_aux=num_states if use_aux else 1,
        layer_ids=layer_ids,
        norm_before_fc=read.flag("norm_before_fc", "norm_before_fc"),
        fc_norm=read.flag("fc_norm", "fc_norm", alias="use_aux_norm"),
        norm_before_residual=read.flag("norm_before_residual"),
        norm_output=read.flag("norm_output", "norm_output", "return_hidden_post_norm"),
        qk_norm=_has_qk_norm(config, family, tensor_names),
        attention_bias=attention_bias,
        # transformers' layers, which speculators takes, have all four biases; flat files were seen with three.
        output_bias=False if not attention_bias else True if family == SPECULATORS else None,
        mlp_bias=read.flag("mlp_bias"),
        fc_bias=read.flag("bias") if family == SPECULATORS else read.optional_flag("bias"),
        logit_scale=read.number("logit_scale", 1.0) or 1.0,
        rope={key: config[key] for key in ROPE_KEYS if config.get(key) is not None} | {"head_dim": head_dim},
        max_position_embeddings=read.size("max_position_embeddings", optional=True),
        windows=layer_windows(read, depth, faults),
    )
    _check_sizes(description, config, faults)
    _check_flags(description, config, faults)
    check_rope(read, description.rope, faults)
    return description


def _has_qk_norm(config: Mapping[str, Any], family: str, tensor_names: Collection[str]) -> bool:
    """Whether heads are normalised: a Qwen3 layer. A flat config need not say so; its tensors do."""
    norms = (".self_attn.q_norm.weight", ".self_attn.k_norm.weight")
    told = family == FLAT and any(name.endswith(norms) for name in tensor_names)
    return config.get("model_type") == "qwen3" or told


def _check_layer_kind(config: Mapping[str, Any], read: Reader, depth: int, faults: Faults) -> None:
    """Faults for layers that are not those of Llama or Qwen3, and for a tied head."""
    for key, known in (("hidden_act", ("silu",)), ("model_type", ("llama", "qwen3"))):
        value = config.get(key)
        if value is not None and value not in known:
            faults.add(f"{key}: expected {' or '.join(map(repr, known))}, found {value!r:.60}")
    if read.flag("tie_word_embeddings"):
        faults.add("tie_word_embeddings true: not supported, the draft's head is its own or the target's")
    if depth > 1 and read.optional_flag("next_layer_regular", "next_layer_regular") is False:
        faults.add("next_layer_regular false: not supported, later layers take hidden_size")


def _check_sizes(draft: DraftDescription, config: Mapping[str, Any], faults: Faults) -> None:
    """Faults for sizes that contradict each other."""
    hidden, heads, kv_heads = draft.hidden_size, draft.num_attention_heads, draft.num_key_value_heads
    if config.get("head_dim") is None and hidden % heads:
        faults.add(f"head_dim: missing, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if draft.head_dim % 2:
        faults.add(f"head_dim: expected an even number, found {draft.head_dim}")
    if heads % kv_heads:
        faults.add(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
    if draft.draft_vocab_size > draft.vocab_size:
        faults.add(f"draft_vocab_size: {draft.draft_vocab_size} is larger than vocab_size {draft.vocab_size}")
    if draft.use_aux and draft.layer_ids and draft.num_aux != len(draft.layer_ids):
        ids = list(draft.layer_ids)
        faults.add(f"num_aux_hidden_states: {draft.num_aux}, but there are {len(ids)} layer ids {ids}")
    if not draft.use_aux and draft.target_hidden_size != hidden:
        faults.add(
            f"target_hidden_size: expected hidden_size {hidden}, since use_aux_hidden_state is false and there is no "
            f"fc, found {draft.target_hidden_size}"
        )


def _check_flags(draft: DraftDescription, config: Mapping[str, Any], faults: Faults) -> None:
    """Faults for flags that contradict each other."""
    if draft.fc_norm and draft.norm_before_fc:
        faults.add("fc_norm and norm_before_fc are both true: engines disagree on what that means")
    for name in ("fc_norm", "norm_before_fc"):
        if getattr(draft, name) and not draft.use_aux:
            faults.add(f"{name} true and use_aux_hidden_state false contradict each other: without aux there is no fc")
    if draft.fc_bias and not draft.use_aux:
        faults.add("bias true and use_aux_hidden_state false contradict each other: without aux there is no fc")
    if draft.mlp_bias and config.get("model_type") == "qwen3":
        faults.add("mlp_bias true and model_type 'qwen3' contradict each other: its layers have none")


def _warn_of_unread(nested: Mapping[str, Any]) -> None:
    if unread := sorted(set(nested) - _READ_EAGLE_KEYS):
        log.warning("eagle_config: keys that change nothing here: %s", ", ".join(unread))
