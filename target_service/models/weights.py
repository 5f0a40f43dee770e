"""Takes a model's tensors out of a checkpoint, each exactly once, and refuses a checkpoint that does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from outrider.checkpoint import Checkpoint, CheckpointError

# Buffers that old exporters wrote beside the weights; they follow from config.json.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_SHOWN = 20


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError with one list of every tensor that is missing, left over or of another shape."""
    tensors = {name: info for name, info in checkpoint.tensors.items() if not _DERIVED.search(name)}
    faults = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    faults += [f"left over {name} {list(info.shape)}" for name, info in tensors.items() if name not in expected]
    faults += [
        f"{name}: expected {list(shape)}, found {list(tensors[name].shape)} in {tensors[name].file.name}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise CheckpointError(
            f"{checkpoint.directory}: {len(faults)} tensors do not fit config.json:\n  "
            + "\n  ".join(faults[:_SHOWN] + more)
        )


class Weights:
    """Loads tensors in the model's dtype, on its device."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def __call__(self, name: str) -> torch.Tensor:
        """Returns one tensor in the model's dtype."""
        return self.checkpoint.load(name).to(self.device, self.dtype)

    def raw(self, name: str) -> torch.Tensor:
        """Returns one tensor as it is stored."""
        return self.checkpoint.load(name).to(self.device)

    def optional(self, name: str) -> torch.Tensor | None:
        """Returns one tensor, or None where the checkpoint has none of that name."""
        return self(name) if name in self else None
