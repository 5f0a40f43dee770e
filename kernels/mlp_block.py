"""The dense feed-forward half of a decoder layer: x + down(swiglu(gate_up(norm(x))))."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear import PackedWeight, linear
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu


@dataclass(frozen=True)
class MlpBlock:
    """The half's weights. gate_up: [2 I, H], gate first; down: [H, I]."""

    norm: torch.Tensor
    eps: float
    gate_up: PackedWeight
    down: PackedWeight


def mlp_block(x: torch.Tensor, block: MlpBlock) -> None:
    """Adds the half's output to x[T, H], in place."""
    mlp_block_torch(x, block)


def mlp_block_torch(x: torch.Tensor, block: MlpBlock) -> None:
    """The half, one operation at a time."""
    x += linear(swiglu(linear(rms_norm(x, block.norm, block.eps), block.gate_up)), block.down)
