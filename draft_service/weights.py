"""Loads a draft's tensors, in the serving dtype, on its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draft_service.inspection import FittedDraft
from draft_service.layout import D2T, EMBED, HEAD, T2D


def load_weights(
    fitted: FittedDraft, shared: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """All tensors of the model by canonical name, and d2t as it is; with a progress bar.

    `shared` are those that come from the target, as it stores them: a table padded beyond vocab_size is cut.
    """
    draft = fitted.draft
    weights: dict[str, torch.Tensor] = {}
    with draft.checkpoint.progress(f"loading {draft.checkpoint.directory.name}"):
        for name, stored in draft.names.items():
            if name != T2D:
                tensor = draft.checkpoint.load(stored)
                weights[name] = tensor.to(device) if name == D2T else tensor.to(device, dtype)
    for name, tensor in shared.items():
        weights[name] = tensor[: draft.description.vocab_size].to(device, dtype)
    assert EMBED in weights and HEAD in weights
    return weights


def serving_dtype(fitted: FittedDraft, name: str) -> torch.dtype:
    """The dtype that `--dtype` asks for; auto is the checkpoint's."""
    if name == "auto":
        stored = fitted.draft.names["fc.weight"]
        return fitted.draft.checkpoint.tensors[stored].dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
