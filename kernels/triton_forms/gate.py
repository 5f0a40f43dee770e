"""The dense feed-forward's gate: partial sums, bias and silu(gate) * up in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_forms.overlap import LAUNCH, after_previous
from kernels.triton_forms.parts import bias_of, sum_parts_of_row

_BLOCK = 512


def swiglu(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns silu(gate) * up, [T, I] in `dtype`, of parts [S, T, 2 I], gate first, added up in order; bias: [2 I]."""
    parts = parts.contiguous()
    num_parts, rows, width = parts.shape
    out = torch.empty(rows, width // 2, dtype=dtype, device=parts.device)
    if rows:
        grid = (rows, triton.cdiv(width // 2, _BLOCK))
        _swiglu[grid](parts, bias, out, rows, width // 2, NUM_PARTS=num_parts, BLOCK=_BLOCK, **LAUNCH)
    return out


@triton.jit(do_not_specialize=["rows"])
def _swiglu(parts, bias, out, rows, width, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_bias, up_bias = bias_of(bias, column, inside), bias_of(bias, column + width, inside)
    after_previous()
    gate = sum_parts_of_row(parts, row, rows, 2 * width, column, inside, NUM_PARTS) + gate_bias
    up = sum_parts_of_row(parts, row, rows, 2 * width, column + width, inside, NUM_PARTS) + up_bias
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row.to(tl.int64) * width + column, value.to(out.dtype.element_ty), mask=inside)
