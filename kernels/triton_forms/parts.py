"""Partial sums, float32 [S, T, N], added up in the order of S whoever reads them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_forms.overlap import LAUNCH, after_previous

_BLOCK = 1024


def sum_parts(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns parts[0] + ... + parts[S - 1] + bias, added up in float32 and rounded once: [T, N] in `dtype`."""
    parts = parts.contiguous()
    num_parts, rows, width = parts.shape
    out = torch.empty(rows, width, dtype=dtype, device=parts.device)
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        _sum_parts[grid](parts, bias, out, rows, width, NUM_PARTS=num_parts, BLOCK=_BLOCK, **LAUNCH)
    return out


@triton.jit
def bias_of(bias, columns, inside):
    """bias[columns] in float32; zeros outside, and where there is no bias."""
    values = tl.zeros_like(columns).to(tl.float32)
    if bias is not None:
        values = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def sum_parts_of_row(parts, row, rows, width, columns, inside, NUM_PARTS: tl.constexpr):
    """parts[:, row, columns] added up in float32; zeros outside."""
    place = parts + row.to(tl.int64) * width + columns
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        x += tl.load(place + part * rows * width, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["rows"])
def _sum_parts(parts, bias, out, rows, width, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    own_bias = bias_of(bias, columns, inside)
    after_previous()
    x = sum_parts_of_row(parts, row, rows, width, columns, inside, NUM_PARTS) + own_bias
    tl.store(out + row.to(tl.int64) * width + columns, x.to(out.dtype.element_ty), mask=inside)
