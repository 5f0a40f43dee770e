"""The layout of the speculators library: its nested config brought into the flat form.

Its `transformer_layer_config` leaves out what equals transformers' defaults for the layer's model_type.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

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
# The library's own default, unlike transformers'.
_DRAFT_VOCAB_SIZE = 32000
# What the top level says of the draft.
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
)


def as_flat(config: Mapping[str, Any], tensor_names: Collection[str], faults: Faults) -> dict[str, Any]:
    """The config as a flat one that leaves nothing to defaults of the layer's kind. `tensor_names` are canonical."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        faults.add(f"transformer_layer_config: expected an object, found {layer!r:.60}")
        return {}
    kind = layer.get("model_type")
    if kind not in LAYER_DEFAULTS:
        expected = " or ".join(LAYER_DEFAULTS)
        faults.add(f"transformer_layer_config.model_type: expected {expected}, found {kind!r}")
        return {}
    flat = LAYER_DEFAULTS[kind] | {key: value for key, value in layer.items() if value is not None}
    flat.setdefault("num_key_value_heads", flat["num_attention_heads"])
    flat.setdefault("num_hidden_layers", _count_layers(tensor_names))
    flat |= {key: config[key] for key in _TOP_LEVEL if config.get(key) is not None}
    flat["draft_vocab_size"] = config.get("draft_vocab_size", _DRAFT_VOCAB_SIZE)
    if config.get("norm_before_residual") is None:
        log.warning("norm_before_residual: missing; taken as true, as vLLM takes it for this layout")
        flat["norm_before_residual"] = True
    # The target's own, copied along: the draft's head stands beside its embedding.
    flat |= {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    _settle_windows(flat)
    return flat


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


def _count_layers(tensor_names: Collection[str]) -> int:
    numbers = (re.match(r"layers\.(\d+)\.", name) for name in tensor_names)
    return max((int(match[1]) + 1 for match in numbers if match), default=1)
