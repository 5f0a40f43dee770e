"""Tiny EAGLE-3 draft checkpoints with random weights: real directories, the same bytes for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from draft_service.speculators import LAYER_DEFAULTS
from tests.models import write_tensors

LAYOUTS = ("A", "A'", "A''", "B")
# Keys of a flat config that the speculators layout keeps at its top level.
_SPECULATORS_TOP = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output")


def tiny_config(
    *,
    draft_vocab_size: int = 96,
    dtype: torch.dtype = torch.float32,
    eagle_config: dict[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """The flat config of a draft for the tiny targets of tests.models (vocabulary 320, hidden 64).

    By default it reads boundaries 1, 2 and 3 of a target of 4 layers (ids 0, 1, 2: layer outputs) and proposes from
    96 tokens. `overrides` go into the config, `eagle_config` into that of the same name.
    """
    nested = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True, **(eagle_config or {})}
    return {
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


def write_tiny_draft(
    directory: str | Path,
    *,
    layout: str = "A'",
    embed: bool = False,
    head: bool = True,
    qk_norm: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    prefix: str = "",
    t2d: bool = False,
    shards: int = 1,
    **settings: Any,
) -> Path:
    """Writes the draft of `tiny_config(**settings)` in a layout of section 1.1 of the specification.

    `embed`, `head`, `t2d`: whether the file has these tensors; `qk_norm`: whether its layers are Qwen3's; `prefix`
    goes before every tensor's name. Returns the directory.
    """
    config = tiny_config(dtype=dtype, **settings)
    tensors = draft_tensors(config, seed, embed=embed, head=head, qk_norm=qk_norm)
    if not t2d:
        tensors.pop("t2d", None)
    named = {
        prefix + stored_name(name, layout): tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory, named, shards)
    config = {"A''": deep_config, "B": speculators_config}.get(layout, dict)(config)
    if layout == "B" and qk_norm:
        config["transformer_layer_config"]["model_type"] = "qwen3"
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory


def point(link: Path, directory: Path) -> None:
    """Makes the link lead to the directory, in one step, as a roll-out of weights does."""
    new = link.with_suffix(".new")
    new.symlink_to(directory)
    new.replace(link)


def stored_name(name: str, layout: str) -> str:
    """What a layout calls a tensor."""
    if layout == "A":
        return name.replace("layers.0.", "midlayer.")
    if layout == "A''" and name.startswith("layers."):
        later = not name.startswith("layers.0.")
        name = name.replace("input_layernorm", "hidden_norm") if later else name
        return name.replace("layers.", "midlayer.", 1)
    return name


def deep_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of layout A''."""
    return {**config, "architectures": ["LlamaForCausalLMEagle3Deep"]}


def speculators_config(config: dict[str, Any]) -> dict[str, Any]:
    """The same draft in the nested form of the speculators library, which leaves out what equals the defaults."""
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    left_out = {*_SPECULATORS_TOP, "architectures", "eagle_config", "torch_dtype", "norm_before_residual"}
    layer = {key: value for key, value in config.items() if key not in left_out}
    defaults = LAYER_DEFAULTS[config["model_type"]]
    layer = {key: value for key, value in layer.items() if key == "model_type" or defaults.get(key) != value}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        # A flat file's ids are outputs of layers, this layout's are boundaries.
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids] if ids else ids,
        "norm_before_residual": config.get("norm_before_residual", False),
        **{key: config[key] for key in _SPECULATORS_TOP if key in config},
    }


def draft_tensors(
    config: dict[str, Any], seed: int, *, embed: bool = True, head: bool = True, qk_norm: bool = False
) -> dict[str, torch.Tensor]:
    """Random float32 tensors of a flat config's draft by canonical name.

    The numbers of one do not depend on which others are left out.
    """

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=_generator(name, seed)) * columns**-0.5 * scale

    hidden, vocab = config["hidden_size"], config["vocab_size"]
    reduced = config.get("draft_vocab_size") or vocab
    linears, norms, biases = _shapes(config, qk_norm)
    tensors = {name: matrix(name, *shape) for name, shape in linears.items()}
    if embed:
        tensors["embed_tokens.weight"] = matrix("embed_tokens.weight", vocab, hidden, hidden**0.5)
    if head:
        tensors["lm_head.weight"] = matrix("lm_head.weight", reduced, hidden, 3.0)
    for name, size in norms.items():
        tensors[name] = 1 + torch.randn(size, generator=_generator(name, seed)) * 0.2
    for name, size in biases.items():
        tensors[name] = torch.randn(size, generator=_generator(name, seed)) * 0.3
    if reduced < vocab:
        kept = torch.randperm(vocab, generator=_generator("d2t", seed))[:reduced].sort().values
        tensors["d2t"] = kept - torch.arange(reduced)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][kept] = True
    return tensors


def _shapes(config: dict[str, Any], qk_norm: bool) -> tuple[dict[str, tuple[int, int]], dict[str, int], dict[str, int]]:
    """Shapes of the linears, norms and biases, but for embedding and head."""
    hidden, width, nested = config["hidden_size"], config["intermediate_size"], config["eagle_config"]
    heads, kv_heads, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    linears: dict[str, tuple[int, int]] = {}
    norms = {"norm.weight": hidden}
    biases: dict[str, int] = {}
    if nested.get("use_aux_hidden_state", True):
        target_hidden = config.get("target_hidden_size") or hidden
        ids = nested.get("eagle_aux_hidden_state_layer_ids")
        num_aux = config.get("num_aux_hidden_states") or (len(ids) if ids else 3)
        linears["fc.weight"] = (hidden, num_aux * target_hidden)
        if config.get("norm_before_fc") or nested.get("norm_before_fc"):
            norms["input_norm.weight"] = num_aux * target_hidden
        if config.get("fc_norm"):
            norms |= {f"fc_norm.{j}.weight": target_hidden for j in range(num_aux)}
        if config.get("bias"):
            biases["fc.bias"] = hidden
    biased = ("q_proj", "k_proj", "v_proj", "o_proj") if config.get("attention_bias") else ()
    biased += ("gate_proj", "up_proj", "down_proj") if config.get("mlp_bias") else ()
    for layer in range(config["num_hidden_layers"] or 1):
        p, inputs = f"layers.{layer}.", hidden if layer else 2 * hidden
        norms |= {f"{p}{name}.weight": hidden for name in ("input_layernorm", "post_attention_layernorm")}
        if not layer:
            norms[f"{p}hidden_norm.weight"] = hidden
        if qk_norm:
            norms |= {f"{p}self_attn.{name}.weight": d for name in ("q_norm", "k_norm")}
        shapes = {
            f"{p}self_attn.q_proj": (heads * d, inputs),
            f"{p}self_attn.k_proj": (kv_heads * d, inputs),
            f"{p}self_attn.v_proj": (kv_heads * d, inputs),
            f"{p}self_attn.o_proj": (hidden, heads * d),
            f"{p}mlp.gate_proj": (width, hidden),
            f"{p}mlp.up_proj": (width, hidden),
            f"{p}mlp.down_proj": (hidden, width),
        }
        linears |= {f"{name}.weight": shape for name, shape in shapes.items()}
        biases |= {f"{name}.bias": shape[0] for name, shape in shapes.items() if name.split(".")[-1] in biased}
    return linears, norms, biases


def _generator(name: str, seed: int) -> torch.Generator:
    """One stream of numbers for each tensor, so that leaving one out changes no other."""
    return torch.Generator().manual_seed(seed * 1_000_003 + sum(ord(c) * (i + 1) for i, c in enumerate(name)))
