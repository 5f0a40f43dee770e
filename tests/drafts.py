"""Tiny EAGLE-3 draft checkpoints with random weights: real directories, the same bytes for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# The prefix of the layer's tensors in each flat layout.
LAYOUTS = {"A": "midlayer.", "A'": "layers.0."}


def write_tiny_draft(
    directory: str | Path,
    *,
    layout: str = "A'",
    draft_vocab_size: int = 96,
    embed: bool = False,
    head: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    prefix: str = "",
    t2d: bool = False,
    eagle_config: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Writes a draft for the tiny targets of tests.models (vocabulary 320, hidden 64). Returns the directory.

    By default it reads boundaries 1, 2 and 3 of a target of 4 layers (ids 0, 1, 2: layer outputs), proposes from 96
    tokens, and takes its embedding from the target. `overrides` go into config.json, `eagle_config` into that of the
    same name; `prefix` goes before every tensor's name.
    """
    nested = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True, **(eagle_config or {})}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 320,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eagle_config": nested,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **overrides,
    }
    tensors = draft_tensors(config, seed, embed=embed, head=head)
    if not t2d:
        tensors.pop("t2d", None)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    named = {
        prefix + name.replace("layers.0.", LAYOUTS[layout]): tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory


def draft_tensors(
    config: dict[str, Any], seed: int, *, embed: bool = True, head: bool = True
) -> dict[str, torch.Tensor]:
    """Random float32 tensors of a draft by canonical name; the numbers do not depend on which are left out."""
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    target_hidden = config.get("target_hidden_size") or hidden
    ids = config["eagle_config"].get("eagle_aux_hidden_state_layer_ids")
    num_aux = config.get("num_aux_hidden_states") or (len(ids) if ids else 3)
    reduced = config.get("draft_vocab_size") or vocab

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=_generator(name, seed)) * columns**-0.5 * scale

    def norm(name: str, size: int) -> torch.Tensor:
        return 1 + torch.randn(size, generator=_generator(name, seed)) * 0.2

    def bias(name: str, size: int) -> torch.Tensor:
        return torch.randn(size, generator=_generator(name, seed)) * 0.3

    shapes = {
        "fc.weight": (hidden, num_aux * target_hidden),
        "layers.0.self_attn.q_proj.weight": (heads * d, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (kv_heads * d, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (kv_heads * d, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, heads * d),
        "layers.0.mlp.gate_proj.weight": (width, hidden),
        "layers.0.mlp.up_proj.weight": (width, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, width),
    }
    tensors = {name: matrix(name, *shape) for name, shape in shapes.items()}
    if embed:
        tensors["embed_tokens.weight"] = matrix("embed_tokens.weight", vocab, hidden, hidden**0.5)
    if head:
        tensors["lm_head.weight"] = matrix("lm_head.weight", reduced, hidden, 3.0)
    norms = {"norm.weight": hidden} | {
        f"layers.0.{name}.weight": hidden for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    if config.get("norm_before_fc") or config["eagle_config"].get("norm_before_fc"):
        norms["input_norm.weight"] = num_aux * target_hidden
    if config.get("fc_norm"):
        norms |= {f"fc_norm.{j}.weight": target_hidden for j in range(num_aux)}
    tensors |= {name: norm(name, size) for name, size in norms.items()}
    if config.get("bias"):
        tensors["fc.bias"] = bias("fc.bias", hidden)
    biased = ("q_proj", "k_proj", "v_proj") if config.get("attention_bias") else ()
    biased += ("gate_proj", "up_proj", "down_proj") if config.get("mlp_bias") else ()
    for name, shape in shapes.items():
        if name.split(".")[-2] in biased:
            stem = name.removesuffix("weight") + "bias"
            tensors[stem] = bias(stem, shape[0])
    if reduced < vocab:
        kept = torch.randperm(vocab, generator=_generator("d2t", seed))[:reduced].sort().values
        tensors["d2t"] = kept - torch.arange(reduced)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][kept] = True
    return tensors


def _generator(name: str, seed: int) -> torch.Generator:
    """One stream of numbers for each tensor, so that leaving one out changes no other."""
    return torch.Generator().manual_seed(seed * 1_000_003 + sum(ord(c) * (i + 1) for i, c in enumerate(name)))
