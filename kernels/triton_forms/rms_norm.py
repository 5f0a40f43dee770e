"""Partial sums, residual and RMSNorm in one pass: a program a row, which stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_forms.overlap import LAUNCH, after_previous
from kernels.triton_forms.parts import bias_of, sum_parts_of_row


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The Triton form of `kernels.rms_norm.rms_norm`."""
    return _launch(x[None], None, None, weight, eps, None)


def add_rms_norm(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(total), total), [T, H], of total = parts[0] + ... + parts[S - 1] + bias + residual.

    parts: [S, T, H], added up in this order in float32 and rounded once, to residual's dtype; bias: [H].
    """
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    return _launch(parts, bias, residual.contiguous(), weight, eps, total), total


def _launch(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor | None,
) -> torch.Tensor:
    parts = parts.contiguous()
    num_parts, rows, width = parts.shape
    out = torch.empty(rows, width, dtype=parts.dtype if total is None else total.dtype, device=parts.device)
    if rows:
        _add_rms_norm[(rows,)](
            parts,
            bias,
            residual,
            weight,
            total,
            out,
            eps,
            rows,
            width,
            NUM_PARTS=num_parts,
            BLOCK=triton.next_power_of_2(width),
            num_warps=max(1, min(8, triton.next_power_of_2(width) // 256)),
            maxnreg=168,  # said, so that the compiler does not load in turns to get by with fewer
            **LAUNCH,
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(
    parts,
    bias,
    residual,
    weight,
    total,
    out,
    eps,
    rows,
    width,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = row.to(tl.int64) * width + columns
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    own_bias = bias_of(bias, columns, inside)
    after_previous()
    x = sum_parts_of_row(parts, row, rows, width, columns, inside, NUM_PARTS) + own_bias
    if residual is not None:
        x += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if total is not None:
        rounded = x.to(out.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(out + place, (x * scale * factors).to(out.dtype.element_ty), mask=inside)
