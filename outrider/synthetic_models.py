"""Shapes of the synthetic models: models of random weights for benchmarks, named by --synthetic.

A target's shapes are those of the published config.json of gpt-oss; beside it stands a draft as SpecForge configures
one for it. `tiny-gpt-oss` is the same in small, for CPUs; `gpt-oss-4-layers` has the widths of the largest and starts
in seconds, to rehearse measurements. No tensors here: the command line reads this, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


@dataclass(frozen=True)
class SyntheticModel:
    """config.json of a target, and of its draft."""

    name: str
    target: dict[str, Any]
    draft: dict[str, Any]


def synthetic_model(name: str) -> SyntheticModel:
    """The model of that name. Raises ValueError, naming the flag, for an unknown one."""
    if name not in SYNTHETIC_MODELS:
        raise ValueError(f"--synthetic: expected one of {', '.join(SYNTHETIC_MODELS)}, found {name!r}")
    return SYNTHETIC_MODELS[name]


def model_name(model: Path | None, synthetic: str) -> str:
    """What a target or draft is called that --model or --synthetic says. Raises ValueError unless one of them does.

    Nobody shall take a synthetic one for the model whose shapes it has.
    """
    if model is not None and synthetic:
        raise ValueError("--model: expected either this or --synthetic, found both")
    if model is not None:
        return model.resolve().name
    if not synthetic:
        raise ValueError("--model: expected this or --synthetic, found neither")
    return f"synthetic-{synthetic_model(synthetic).name}"


_TABLE = {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
_TINY = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}


def _model(
    name: str,
    sizes: dict[str, int],
    *,
    layers: int,
    experts: int,
    top_k: int,
    intermediate: int,
    vocabulary: int,
    window: int,
    draft_layer_ids: list[int],
    draft_intermediate: int,
    draft_vocabulary: int,
) -> SyntheticModel:
    common = {**sizes, "vocab_size": vocabulary, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    target = {
        **common,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)],
        "sliding_window": window,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "eos_token_id": min(200002, vocabulary - 1),
        "quantization_config": {"quant_method": "mxfp4"},
        "torch_dtype": "bfloat16",
    }
    draft = {
        **common,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "intermediate_size": draft_intermediate,
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": draft_layer_ids},
        "torch_dtype": "bfloat16",
    }
    return SyntheticModel(name, target, draft)


_GPT_OSS: dict[str, Any] = {
    "sizes": _TABLE,
    "top_k": 4,
    "intermediate": 2880,
    "vocabulary": 201088,
    "window": 128,
    "draft_intermediate": 17280,
    "draft_vocabulary": 32000,
}
SYNTHETIC_MODELS = {
    model.name: model
    for model in (
        _model("gpt-oss-120b", layers=36, experts=128, draft_layer_ids=[1, 17, 33], **_GPT_OSS),
        _model("gpt-oss-20b", layers=24, experts=32, draft_layer_ids=[1, 11, 21], **_GPT_OSS),
        _model(
            "tiny-gpt-oss",
            _TINY,
            layers=4,
            experts=16,
            top_k=2,
            intermediate=64,
            vocabulary=512,
            window=32,
            draft_layer_ids=[0, 1, 2],
            draft_intermediate=128,
            draft_vocabulary=128,
        ),
        _model("gpt-oss-4-layers", layers=4, experts=128, draft_layer_ids=[0, 1, 2], **_GPT_OSS),
    )
}

Synthetic = Annotated[
    str,
    typer.Option(
        help=f"Random weights instead of --model, for benchmarks: {', '.join(SYNTHETIC_MODELS)}.", show_default=False
    ),
]
