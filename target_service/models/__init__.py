"""The models that a target can serve."""

from __future__ import annotations

import os

import torch

from outrider.checkpoint import Checkpoint
from target_service.models.batch import ForwardBatch, ForwardOutput
from target_service.models.config import ModelConfig, read_model_config, wrong
from target_service.models.decoder import Model
from target_service.models.gpt_oss import build_gpt_oss
from target_service.models.llama import build_llama
from target_service.models.qwen3 import build_qwen3

__all__ = ["ForwardBatch", "ForwardOutput", "Model", "ModelConfig", "build_model", "load_model"]

_FAMILIES = {
    "LlamaForCausalLM": build_llama,
    "GptOssForCausalLM": build_gpt_oss,
    "Qwen3ForCausalLM": build_qwen3,
    "Qwen3MoeForCausalLM": build_qwen3,
}


def load_model(
    directory: str | os.PathLike[str], device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto"
) -> Model:
    """Loads the checkpoint in `directory`; otherwise as `build_model`."""
    return build_model(Checkpoint(directory), torch.device(device), dtype)


def build_model(checkpoint: Checkpoint, device: torch.device, dtype: str | torch.dtype = "auto") -> Model:
    """Loads a checkpoint on a device. dtype: auto (the checkpoint's), float32 or bfloat16.

    Raises CheckpointError for an architecture that is not served here, and for a checkpoint that does not fit.
    """
    names = checkpoint.config.get("architectures") or []
    build = _FAMILIES.get(names[0]) if names else None
    if build is None:
        raise wrong(checkpoint, "architectures", f"one of {', '.join(_FAMILIES)}", names)
    config = read_model_config(checkpoint, dtype)
    with checkpoint.progress(f"Loading {checkpoint.directory.name}"):
        return build(checkpoint, config, device)
