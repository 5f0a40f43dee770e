"""The mixture-of-experts half of a decoder layer: x + moe(norm(x))."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kernels import native
from kernels.linear import PackedWeight
from kernels.moe import Experts, moe
from kernels.mxfp4 import Mxfp4Weight
from kernels.native import structs
from kernels.rms_norm import rms_norm


@dataclass(frozen=True)
class MoeBlock:
    """The half's weights."""

    norm: torch.Tensor
    eps: float
    experts: Experts

    @cached_property
    def native(self) -> structs.MoeBlock | None:
        """The C structure, None in the PyTorch form."""
        experts = self.experts
        gate_up, down = _linears(experts.gate_up), _linears(experts.down)
        if experts.router.native is None or gate_up is None or down is None:
            return None
        norm = self.norm.float()
        block = structs.MoeBlock(
            norm.data_ptr(),
            self.eps,
            experts.router.native,
            gate_up,
            down,
            experts.top_k,
            experts.normalize,
            experts.alpha,
            experts.limit,
            experts.offset,
        )
        block.owners = norm, gate_up, down
        return block


def moe_block(x: torch.Tensor, block: MoeBlock) -> None:
    """Adds the half's output to x[T, H], in place."""
    library = native.library()
    if library is None or block.native is None:
        return moe_block_torch(x, block)
    if x.dtype != block.experts.router.dtype or not x.is_contiguous():
        raise ValueError(f"mixture of experts: expected contiguous {block.experts.router.dtype}, found {x.dtype}")
    native.call(
        library.outrider_moe_block, ctypes.byref(block.native), x.data_ptr(), x.dtype == torch.bfloat16, x.shape[0]
    )


def moe_block_torch(x: torch.Tensor, block: MoeBlock) -> None:
    """The half, one operation at a time."""
    x += moe(rms_norm(x, block.norm, block.eps), block.experts)


def _linears(weights: Sequence[PackedWeight | Mxfp4Weight]) -> ctypes.Array[structs.Linear] | None:
    packed = [weight.native for weight in weights if weight.native is not None]
    return (structs.Linear * len(packed))(*packed) if len(packed) == len(weights) else None
