"""The dense feed-forward half of a decoder layer: x + down(swiglu(gate_up(norm(x))))."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch

from kernels import native
from kernels.linear import PackedWeight, linear
from kernels.native import structs
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu


@dataclass(frozen=True)
class MlpBlock:
    """The half's weights. gate_up: [2 I, H], gate first; down: [H, I]."""

    norm: torch.Tensor
    eps: float
    gate_up: PackedWeight
    down: PackedWeight

    @cached_property
    def native(self) -> structs.MlpBlock | None:
        """The C structure, None in the PyTorch form, and where gate and up do not fill whole panels."""
        library = native.library()
        if library is None or self.gate_up.native is None or self.down.native is None:
            return None
        if self.down.shape[1] % library.outrider_panel():
            return None
        norm = self.norm.float()
        block = structs.MlpBlock(norm.data_ptr(), self.eps, self.gate_up.native, self.down.native)
        block.owner = norm
        return block


def mlp_block(x: torch.Tensor, block: MlpBlock) -> None:
    """Adds the half's output to x[T, H], in place."""
    library = native.library()
    if library is None or block.native is None:
        return mlp_block_torch(x, block)
    if x.dtype != block.down.dtype or not x.is_contiguous():
        raise ValueError(f"mlp: expected contiguous {block.down.dtype}, found {x.dtype}")
    native.call(
        library.outrider_mlp_block, ctypes.byref(block.native), x.data_ptr(), x.dtype == torch.bfloat16, x.shape[0]
    )


def mlp_block_torch(x: torch.Tensor, block: MlpBlock) -> None:
    """The half, one operation at a time."""
    x += linear(swiglu(linear(rms_norm(x, block.norm, block.eps), block.gate_up)), block.down)
