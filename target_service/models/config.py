"""What the rest of the target knows about a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.checkpoint import Checkpoint, CheckpointError


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and tokens of a model, from config.json and generation_config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype


_EMBEDDING = "model.embed_tokens.weight"


def read_model_config(checkpoint: Checkpoint, dtype: str | torch.dtype = "auto") -> ModelConfig:
    """Reads the keys that both families share. Raises CheckpointError naming the key that is missing or wrong."""
    config = checkpoint.config
    heads = positive(checkpoint, "num_attention_heads")
    hidden = positive(checkpoint, "hidden_size")
    head_dim = positive(checkpoint, "head_dim", hidden // heads)
    kv_heads = positive(checkpoint, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise wrong(checkpoint, "num_key_value_heads", f"a divisor of num_attention_heads {heads}", kv_heads)
    if head_dim % 2:
        raise wrong(checkpoint, "head_dim", "an even number", head_dim)
    if config.get("hidden_act", "silu") != "silu":
        raise wrong(checkpoint, "hidden_act", "silu", config["hidden_act"])
    return ModelConfig(
        architecture=config["architectures"][0],
        vocab_size=positive(checkpoint, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(checkpoint, "intermediate_size"),
        num_layers=positive(checkpoint, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positive(checkpoint, "max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(checkpoint),
        dtype=_dtype(checkpoint, dtype),
    )


def positive(checkpoint: Checkpoint, key: str, default: int | None = None) -> int:
    """Returns a positive integer of config.json."""
    value = checkpoint.config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise wrong(checkpoint, key, "a positive integer", value)
    return value


def wrong(checkpoint: Checkpoint, key: str, expected: str, found: Any) -> CheckpointError:
    """The error for a key of config.json that this service cannot honour."""
    return CheckpointError(f"{checkpoint.directory / 'config.json'}: {key}: expected {expected}, found {found!r}")


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    for content in (checkpoint.optional_json("generation_config.json"), checkpoint.config):
        ids = _ids(content)
        if ids:
            return ids
    return ()


def _ids(content: Mapping[str, Any]) -> tuple[int, ...]:
    value = content.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(token) for token in (value if isinstance(value, list) else [value]))


def _dtype(checkpoint: Checkpoint, dtype: str | torch.dtype) -> torch.dtype:
    """auto: the embedding's own; half precision is widened, since no kernel computes in it."""
    if dtype == "auto":
        info = checkpoint.tensors.get(_EMBEDDING)
        return torch.bfloat16 if info is not None and info.dtype == torch.bfloat16 else torch.float32
    chosen = getattr(torch, dtype) if dtype in ("float32", "bfloat16") else dtype
    if chosen not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype: expected auto, float32 or bfloat16, found {dtype}")
    return chosen
