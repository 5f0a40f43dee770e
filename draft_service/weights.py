"""Loads a draft's tensors, in the serving dtype, on its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draft_service.inspection import FittedDraft
from draft_service.layout import D2T, EMBED, HEAD, T2D
from outrider.checkpoint import CheckpointError


def load_weights(
    fitted: FittedDraft, shared: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """All tensors of the model by canonical name, and d2t as it is; with a progress bar.

    `shared` are those that come from the target, as it stores them: a table padded beyond vocab_size is cut. Raises
    CheckpointError for one that is too small.
    """
    draft = fitted.draft
    weights: dict[str, torch.Tensor] = {}
    with draft.checkpoint.progress(f"loading {draft.checkpoint.directory.name}"):
        for name, stored in draft.names.items():
            if name != T2D:
                tensor = draft.checkpoint.load(stored)
                # A copy, never the file's own pages: the files may be replaced while the draft serves.
                weights[name] = tensor.to(device, tensor.dtype if name == D2T else dtype, copy=True)
                draft.checkpoint.release(stored)
    rows, columns = draft.description.vocab_size, draft.description.hidden_size
    for name, tensor in shared.items():
        if tensor.shape[0] < rows or tensor.shape[1:] != (columns,):
            raise CheckpointError(
                f"{name}: missing from {draft.checkpoint.directory}, and the target's is {list(tensor.shape)} where "
                f"[{rows}, {columns}] is needed"
            )
        weights[name] = tensor[:rows].to(device, dtype)
    assert EMBED in weights and HEAD in weights
    return weights


def serving_dtype(fitted: FittedDraft, name: str) -> torch.dtype:
    """The dtype that `--dtype` asks for; auto is the checkpoint's."""
    if name == "auto":
        info = fitted.draft.checkpoint.tensors[fitted.draft.names["layers.0.self_attn.q_proj.weight"]]
        # Half precision is widened: no kernel computes in it.
        return torch.bfloat16 if info.dtype == torch.bfloat16 else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
