"""Checkpoints of any size that are nothing but headers: files with holes where the weights would be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]

_BYTES = {"BF16": 2, "U8": 1, "I64": 8, "BOOL": 1}
_OF_OTHER_TYPES = {"_blocks": "U8", "_scales": "U8", "d2t": "I64", "t2d": "BOOL"}


def write_headers(directory: Path, config: Mapping[str, Any], shapes: Shapes, shards: int = 1) -> Path:
    """Writes config.json and safetensors files whose tensors read as zeros. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{shard:05d}-of-{shards - 1:05d}.safetensors"
        part = dict(list(shapes.items())[shard::shards])
        _write_file(directory / name, part)
        weight_map |= dict.fromkeys(part, name)
    if shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def _write_file(path: Path, shapes: Shapes) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        dtype = next((found for suffix, found in _OF_OTHER_TYPES.items() if name.endswith(suffix)), "BF16")
        begin, end = end, end + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def gpt_oss_shapes(num_layers: int, experts: int) -> Shapes:
    """The published names and sizes of gpt-oss: 36 layers of 128 experts (120b), 24 of 32 (20b)."""
    hidden, intermediate, queries, keys, blocks = 2880, 2880, 4096, 512, 90
    shapes: Shapes = {
        "model.embed_tokens.weight": (201088, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (201088, hidden),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        for name, outputs, inputs in (
            ("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, queries)
        ):  # fmt: skip
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (outputs, inputs)
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (outputs,)
        shapes[f"{prefix}self_attn.sinks"] = (64,)
        shapes[f"{prefix}mlp.router.weight"] = (experts, hidden)
        shapes[f"{prefix}mlp.router.bias"] = (experts,)
        for name, outputs in (("gate_up_proj", 2 * intermediate), ("down_proj", hidden)):
            stem = f"{prefix}mlp.experts.{name}"
            shapes[f"{stem}_blocks"] = (experts, outputs, blocks, 16)
            shapes[f"{stem}_scales"] = (experts, outputs, blocks)
            shapes[f"{stem}_bias"] = (experts, outputs)
    return shapes


def draft_shapes(config: Mapping[str, Any], prefix: str, embed: bool, head: bool) -> Shapes:
    """Tensors of a draft of one layer, by the names of its layout, from what its (flat) config says."""
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    draft_vocab, head_dim = config.get("draft_vocab_size") or vocab, config.get("head_dim") or 128
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    nested = config.get("eagle_config", {})
    states = 3 * (config.get("target_hidden_size") or hidden)
    shapes: Shapes = {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}hidden_norm.weight": (hidden,),
        f"{prefix}self_attn.q_proj.weight": (queries, 2 * hidden),
        f"{prefix}self_attn.k_proj.weight": (keys, 2 * hidden),
        f"{prefix}self_attn.v_proj.weight": (keys, 2 * hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}mlp.gate_proj.weight": (width, hidden),
        f"{prefix}mlp.up_proj.weight": (width, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, width),
        "norm.weight": (hidden,),
    }
    if nested.get("use_aux_hidden_state", True):
        shapes["fc.weight"] = (hidden, states)
    if config.get("norm_before_fc") or nested.get("norm_before_fc"):
        shapes["input_norm.weight"] = (states,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{j}.weight": (states // 3,) for j in range(3)}
    if embed:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if head:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    if draft_vocab < vocab:
        shapes["d2t"] = (draft_vocab,)
    return shapes
