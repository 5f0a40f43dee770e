"""The mixture-of-experts half of a decoder layer: x + moe(norm(x))."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.moe import Experts, moe
from kernels.rms_norm import rms_norm


@dataclass(frozen=True)
class MoeBlock:
    """The half's weights."""

    norm: torch.Tensor
    eps: float
    experts: Experts


def moe_block(x: torch.Tensor, block: MoeBlock) -> None:
    """Adds the half's output to x[T, H], in place."""
    x += moe(rms_norm(x, block.norm, block.eps), block.experts)
