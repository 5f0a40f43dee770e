"""Which kind of draft a checkpoint is: recognised from its config and tensor names, foreign kinds refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from draft_service.faults import Faults

FLAT, SPECULATORS = "flat", "speculators"

_ARCHITECTURES = {
    FLAT: ("LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3Deep"),
    SPECULATORS: ("Eagle3Speculator", "Eagle3DraftModel"),
}
_MLA = "latent attention (MLA)"
_PARALLEL = "parallel drafting (P-EAGLE)"
_EAGLE_1 = "an EAGLE-1 or MTP draft"
_EH_PROJ = "a draft with eh_proj in front of its layer"
_MEDUSA = "Medusa heads"
_QUANTISED = "quantised weights"
# Architectures of other kinds, with what to call them.
_FOREIGN_ARCHITECTURES = {
    "LlamaForCausalLMEagle": "an EAGLE-1 draft",
    "EagleLlamaForCausalLM": "an EAGLE-1 draft",
    "Eagle3DeepseekV2ForCausalLM": f"an EAGLE-3 draft with {_MLA}",
    "Eagle3DeepSeekV3ForCausalLM": f"an EAGLE-3 draft with {_MLA}",
    "MistralLarge3EagleForCausalLM": _EH_PROJ,
    "PeagleLlamaForCausalLM": "a parallel draft (P-EAGLE)",
    "PeagleQwen3ForCausalLM": "a parallel draft (P-EAGLE)",
    "MedusaModel": _MEDUSA,
}
# Config keys whose mere presence names another algorithm.
_FOREIGN_KEYS = {
    "kv_lora_rank": _MLA,
    "dflash_config": "DFlash",
    "mask_token_id": _PARALLEL,
    "pard_token": _PARALLEL,
    "ptd_token_id": _PARALLEL,
    "dspark_noise_token_id": _PARALLEL,
    "medusa_num_heads": _MEDUSA,
    "quantization_config": _QUANTISED,
    "compression_config": _QUANTISED,
}
_FOREIGN_TENSORS = {
    r"mask_hidden": _PARALLEL,
    r"parallel_draft_heads\..*": "parallel draft heads",
    r"medusa_heads?\..*": _MEDUSA,
    r"(enorm|hnorm)\..*": _EAGLE_1,
    r"eh_proj\..*": _EH_PROJ,
    r".*\.(weight_scale(_\d|_inv)?|input_scale|qweight|qzeros|weight_packed|weight_scales?|weight_blocks)": _QUANTISED,
    r".*\.self_attn\.(q_a_proj|q_b_proj|kv_b_proj|kv_a_proj_with_mqa)\..*": _MLA,
    r".*\.mlp\.(experts|gate|router)\..*": "a mixture of experts",
}


def recognise(config: Mapping[str, Any], tensor_names: Collection[str], subject: str) -> str:
    """Returns the family: FLAT or SPECULATORS. Raises CheckpointError that lists every sign of another kind of draft.

    `tensor_names` are canonical (see layout.py).
    """
    refused = Faults(f"{subject}: not a draft that this service runs")
    family = _family(config, refused)
    layer = config.get("transformer_layer_config")
    for where, keys in (("", config), ("transformer_layer_config.", layer if isinstance(layer, Mapping) else {})):
        for key, algorithm in _FOREIGN_KEYS.items():
            # A layer's config may have the target's quantisation in it; then the draft's tensors tell.
            if keys.get(key) is not None and not (where and algorithm == _QUANTISED):
                refused.add(f"{where}{key} {keys[key]!r:.60}: a sign of {algorithm}")
    if config.get("parallel_drafting"):
        refused.add(f"parallel_drafting true: a sign of {_PARALLEL}")
    nested = config.get("eagle_config")
    _refuse_nested(nested if isinstance(nested, Mapping) else {}, refused)
    for pattern, algorithm in _FOREIGN_TENSORS.items():
        if found := sorted(name for name in tensor_names if re.fullmatch(pattern, name)):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            refused.add(f"tensor {found[0]}{more}: a sign of {algorithm}")
    _refuse_architecture(config, family, tensor_names, refused)
    refused.raise_if_any()
    return family


def layout_of(family: str, stored_names: Collection[str]) -> str:
    """What the layout is called: by family, and by how the file names its layers."""
    if family == SPECULATORS:
        return "speculators (B)"
    names = [name.removeprefix("model.") for name in stored_names]
    if any(re.match(r"midlayer\.\d", name) for name in names):
        return "flat (A'': midlayer.N)"
    return "flat (A: midlayer)" if any(name.startswith("midlayer.") for name in names) else "flat (A': layers.N)"


def count_layers(tensor_names: Collection[str]) -> int:
    """How many layers the tensors, by canonical name, are of."""
    numbers = (re.match(r"layers\.(\d+)\.", name) for name in tensor_names)
    return max((int(match[1]) + 1 for match in numbers if match), default=1)


def _family(config: Mapping[str, Any], refused: Faults) -> str:
    """Speculators where any of its keys is there; another of its algorithms is refused."""
    if config.get("speculators_model_type") is None and config.get("speculators_config") is None:
        return FLAT
    nested = config.get("speculators_config")
    if not isinstance(nested, Mapping | None):
        refused.add(f"speculators_config: expected an object, found {nested!r:.60}")
    stated = {
        "speculators_model_type": config.get("speculators_model_type"),
        "speculators_config.algorithm": nested.get("algorithm") if isinstance(nested, Mapping) else None,
    }
    found = {key: algorithm for key, algorithm in stated.items() if algorithm is not None}
    for key, algorithm in found.items():
        if algorithm != "eagle3":
            refused.add(f"{key} {algorithm!r}: another algorithm than eagle3")
    if not found:
        refused.add("speculators_model_type: expected 'eagle3', found none")
    return SPECULATORS


def _refuse_nested(eagle_config: Mapping[str, Any], refused: Faults) -> None:
    """Variants that `eagle_config` switches on."""
    for key, algorithm in (
        ("use_mtp_layernorm", _EAGLE_1),
        ("eh_proj_before_attn", _EH_PROJ),
        ("eh_proj_bias", _EH_PROJ),
    ):
        if eagle_config.get(key):
            refused.add(f"eagle_config.{key} true: a sign of {algorithm}")
    for key, meaning in (
        ("use_input_layernorm_in_first_layer", "no norm on the hidden state"),
        ("use_last_layernorm", "no norm in front of the head"),
    ):
        if eagle_config.get(key) is False:
            refused.add(f"eagle_config.{key} false: {meaning}, which is not supported")
    for key in ("parallel_draft_step", "parallel_draft_heads_num_layers"):
        number = eagle_config.get(key)
        if number is not None and not (isinstance(number, int) and number <= 1):
            refused.add(f"eagle_config.{key} {number!r:.60}: a sign of parallel draft heads")


def _refuse_architecture(
    config: Mapping[str, Any], family: str, tensor_names: Collection[str], refused: Faults
) -> None:
    """An architecture that is not one of the family's, with what is known of it."""
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    known = _ARCHITECTURES[family]
    if architecture in known:
        return
    if isinstance(architecture, str) and architecture in _FOREIGN_ARCHITECTURES:
        refused.add(f"architectures {architecture!r}: {_FOREIGN_ARCHITECTURES[architecture]}")
        return
    hint = ""
    if family == FLAT and "fc.weight" in tensor_names:
        is_eagle_3 = "layers.0.hidden_norm.weight" in tensor_names
        hint = f"; its tensors are those of {'an EAGLE-3' if is_eagle_3 else 'an EAGLE-1'} draft"
    if family == SPECULATORS:
        hint = "; speculators_model_type or speculators_config says that it is of that library"
    refused.add(f"architectures: expected {' or '.join(known)}, found {architecture!r:.60}{hint}")
