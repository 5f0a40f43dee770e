"""Which kind of draft a checkpoint is: recognised from its config and tensor names, foreign kinds refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from draft_service.faults import Faults

FLAT = "flat"

_FLAT_ARCHITECTURES = ("LlamaForCausalLMEagle3",)
_SPECULATORS_ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")
# Architectures of other kinds, with what to call them.
_FOREIGN_ARCHITECTURES = {
    "LlamaForCausalLMEagle3Deep": "an EAGLE-3 draft of several layers, which is not supported yet",
    "LlamaForCausalLMEagle": "an EAGLE-1 draft",
    "EagleLlamaForCausalLM": "an EAGLE-1 draft",
    "Eagle3DeepseekV2ForCausalLM": "an EAGLE-3 draft with latent attention (MLA)",
    "Eagle3DeepSeekV3ForCausalLM": "an EAGLE-3 draft with latent attention (MLA)",
    "MistralLarge3EagleForCausalLM": "a draft with eh_proj in front of its layer",
    "PeagleLlamaForCausalLM": "a parallel draft (P-EAGLE)",
    "PeagleQwen3ForCausalLM": "a parallel draft (P-EAGLE)",
}
_PARALLEL = "parallel drafting (P-EAGLE)"
# Config keys whose mere presence names another algorithm.
_FOREIGN_KEYS = {
    "kv_lora_rank": "latent attention (MLA)",
    "dflash_config": "DFlash",
    "mask_token_id": _PARALLEL,
    "pard_token": _PARALLEL,
    "ptd_token_id": _PARALLEL,
    "dspark_noise_token_id": _PARALLEL,
    "quantization_config": "quantised weights",
}
_FOREIGN_TENSORS = {
    r"mask_hidden": _PARALLEL,
    r"parallel_draft_heads\..*": "parallel draft heads",
    r"(enorm|hnorm)\..*": "an EAGLE-1 or MTP draft",
    r"eh_proj\..*": "a draft with eh_proj in front of its layer",
    r".*\.(weight_scale(_\d|_inv)?|input_scale|qweight|weight_packed)": "quantised weights",
    r".*\.kv_a_proj_with_mqa\..*": "latent attention (MLA)",
    r".*\.self_attn\.[qk]_norm\.weight": "a Qwen3-type layer (q_norm, k_norm), which is not supported yet",
}


def recognise(config: Mapping[str, Any], tensor_names: Collection[str], subject: str) -> str:
    """Returns the layout's name: "flat". Raises CheckpointError that lists every sign of another kind of draft.

    `tensor_names` are canonical (see layout.py).
    """
    refused = Faults(f"{subject}: not a draft that this service runs")
    _refuse_speculators(config, refused)
    eagle_config = config.get("eagle_config") or {}
    for key, algorithm in _FOREIGN_KEYS.items():
        if config.get(key) is not None:
            refused.add(f"{key} {config[key]!r:.60}: a sign of {algorithm}")
    if config.get("parallel_drafting"):
        refused.add(f"parallel_drafting true: a sign of {_PARALLEL}")
    _refuse_nested(eagle_config, refused)
    for pattern, algorithm in _FOREIGN_TENSORS.items():
        if found := sorted(name for name in tensor_names if re.fullmatch(pattern, name)):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            refused.add(f"tensor {found[0]}{more}: a sign of {algorithm}")
    if _is_flat(config, refused):
        _refuse_depth(config, tensor_names, refused)
    refused.raise_if_any()
    return FLAT


def _refuse_speculators(config: Mapping[str, Any], refused: Faults) -> None:
    if "speculators_model_type" in config or "speculators_config" in config:
        nested = (config.get("speculators_config") or {}).get("algorithm")
        algorithm = config.get("speculators_model_type") or nested or "unnamed"
        if algorithm == "eagle3":
            refused.add("speculators_model_type 'eagle3': the speculators layout is not supported yet")
        else:
            refused.add(f"speculators_model_type {algorithm!r}: another algorithm than eagle3")


def _refuse_nested(eagle_config: Mapping[str, Any], refused: Faults) -> None:
    """Variants that `eagle_config` switches on."""
    for key, algorithm in (
        ("use_mtp_layernorm", "an EAGLE-1 or MTP draft"),
        ("eh_proj_before_attn", "a draft with eh_proj in front of its layer"),
        ("eh_proj_bias", "a draft with eh_proj in front of its layer"),
    ):
        if eagle_config.get(key):
            refused.add(f"eagle_config.{key} true: a sign of {algorithm}")
    for key, meaning in (
        ("use_input_layernorm_in_first_layer", "no norm on the embedding"),
        ("use_last_layernorm", "no norm in front of the head"),
        ("use_aux_hidden_state", "the target's last hidden state alone, without fc; not supported yet"),
    ):
        if eagle_config.get(key) is False:
            refused.add(f"eagle_config.{key} false: {meaning}")
    for key in ("parallel_draft_step", "parallel_draft_heads_num_layers"):
        if (eagle_config.get(key) or 1) > 1:
            refused.add(f"eagle_config.{key} {eagle_config[key]}: a sign of parallel draft heads")


def _refuse_depth(config: Mapping[str, Any], tensor_names: Collection[str], refused: Faults) -> None:
    numbers = {int(match[1]) for name in tensor_names if (match := re.match(r"layers\.(\d+)\.", name))}
    depth = max([config.get("num_hidden_layers") or 1, *(number + 1 for number in numbers)])
    if depth > 1:
        refused.add(f"{depth} layers: an EAGLE-3 draft of several layers is not supported yet")


def _is_flat(config: Mapping[str, Any], refused: Faults) -> bool:
    """Whether the architecture is one that this service runs; others are refused, unknown ones with what is known."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture in _FLAT_ARCHITECTURES:
        return True
    if architecture in _FOREIGN_ARCHITECTURES:
        refused.add(f"architectures {architecture!r}: {_FOREIGN_ARCHITECTURES[architecture]}")
    elif architecture not in _SPECULATORS_ARCHITECTURES or not refused:
        refused.add(f"architectures: expected {' or '.join(_FLAT_ARCHITECTURES)}, found {architecture!r}")
    return False
