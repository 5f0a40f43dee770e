"""The layout of the speculators library: its nested config brought into the flat form.

Its `transformer_layer_config` leaves out what equals transformers' defaults for the layer's model_type.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from draft_service.families import count_layers
from draft_service.faults import Faults
from draft_service.windows import FULL, SLIDING

log = logging.getLogger(__name__)

# transformers' own defaults, as far as a draft's forward pass depends on them.
_SHARED_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}
LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        **_SHARED_DEFAULTS,
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
    },
    "qwen3": {
        **_SHARED_DEFAULTS,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
# What a layer's config may say beside these; the rest of it is the target's and changes nothing.
_LAYER_KEYS = {key for defaults in LAYER_DEFAULTS.values() for key in defaults} | {
    "model_type",
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
}
# The library's own default, unlike transformers'.
_DRAFT_VOCAB_SIZE = 32000
# What the top level says of the draft. A tied head there is the draft's; in the layer's config it is the target's.
_TOP_LEVEL = (
    "architectures",
    "target_hidden_size",
    "num_aux_hidden_states",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "logit_scale",
    "tie_word_embeddings",
    # Not the library's; where a file has them, they count as in the flat layout.
    "eagle_config",
    "use_aux_hidden_state",
    "use_aux_norm",
    "bias",
)
# These may differ: they are of the draft as a whole in one place and of the target, or its layer, in the other.
_OF_BOTH = {"architectures", "model_type", "tie_word_embeddings"}


def as_flat(config: Mapping[str, Any], tensor_names: Collection[str], faults: Faults) -> dict[str, Any]:
    """The config as a flat one that leaves nothing to defaults of the layer's kind. `tensor_names` are canonical."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        faults.add(f"transformer_layer_config: expected an object, found {layer!r:.60}")
        return {}
    kind = layer.get("model_type")
    if not isinstance(kind, str) or kind not in LAYER_DEFAULTS:
        expected = " or ".join(LAYER_DEFAULTS)
        faults.add(f"transformer_layer_config.model_type: expected {expected}, found {kind!r}")
        return {}
    stated = {key: layer[key] for key in _LAYER_KEYS if layer.get(key) is not None}
    flat = LAYER_DEFAULTS[kind] | stated
    flat.setdefault("num_key_value_heads", flat["num_attention_heads"])
    flat.setdefault("num_hidden_layers", count_layers(tensor_names))
    _check_places(config, layer, flat, faults)
    flat |= {key: config[key] for key in _TOP_LEVEL if config.get(key) is not None}
    flat["draft_vocab_size"] = config.get("draft_vocab_size", _DRAFT_VOCAB_SIZE)
    if config.get("norm_before_residual") is None:
        log.warning("norm_before_residual: missing; taken as true, as vLLM takes it for this layout")
        flat["norm_before_residual"] = True
    _settle_windows(flat)
    return flat


def _check_places(
    config: Mapping[str, Any], layer: Mapping[str, Any], meant: Mapping[str, Any], faults: Faults
) -> None:
    """Faults for keys of the top level that say otherwise than the layer's config, or than its silence means."""
    for key in sorted(_LAYER_KEYS.union(_TOP_LEVEL) - _OF_BOTH):
        outer, inner = config.get(key), layer.get(key)
        if outer is None or outer == inner:
            continue
        if inner is not None:
            faults.add(f"{key} {outer!r:.60} and transformer_layer_config.{key} {inner!r:.60} contradict each other")
        elif key in _LAYER_KEYS and outer != meant.get(key):
            means = f"; its silence means {meant[key]!r:.60}" if key in meant else ""
            faults.add(f"{key} {outer!r:.60}: expected in transformer_layer_config{means}")


def _settle_windows(flat: dict[str, Any]) -> None:
    """Without layer_types, transformers lets Qwen3's layers from max_window_layers on slide, and Llama's never."""
    if flat.get("layer_types") is not None:
        if flat["model_type"] == "llama":
            flat.pop("use_sliding_window", None)
        return
    first = flat.get("max_window_layers") if flat.pop("use_sliding_window", False) else None
    depth = flat["num_hidden_layers"]
    if isinstance(first, int) and isinstance(depth, int) and first < depth:
        flat["layer_types"] = [FULL] * first + [SLIDING] * (depth - first)
    else:
        flat.pop("sliding_window", None)
