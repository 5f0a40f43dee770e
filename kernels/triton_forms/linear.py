"""Linear layers of few rows: bound by reading the weight, which every program does once, a tile of outputs each.

The splits of the inputs follow from the weight's shape alone, and a tile has sixteen rows whether they are there or
not, or thirty-two that go through the same instructions in the same order, so a row's bits are its own. With more rows
more tiles read the same weight, at once, out of the L2 cache, and every tile of outputs reads the rows: both tiles are
larger then. From MOST_ROWS on the library's product is faster, and its bits are not those of few rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.triton_forms.overlap import (
    LAUNCH,
    READER_LAUNCH,
    READERS_OVERLAP,
    prefetch,
    reader_after_previous,
    reader_has_read,
)
from kernels.triton_forms.parts import sum_parts

MOST_ROWS = 64
TILE_ROWS, MANY_TILE_ROWS = 16, 32  # with 64 the compiler would take other instructions
TILE_OUTPUTS, MANY_TILE_OUTPUTS, WIDE_TILE_OUTPUTS = 32, 64, 128
BLOCK_K = 64
# At least so many, of an H200's 132 multiprocessors; a constant, since the splits follow from it. A program takes about
# 0.25 us for its 4 KB a turn, whatever is on its way: fewer than three a multiprocessor do not fill the bandwidth.
PROGRAMS = 352
MOST_SPLITS = 16
WARPS = 4
# One less is on its way: 7 of 4 KB a program, two programs and more a multiprocessor, where 27 KB hide the latency.
STAGES, LARGE_STAGES = 8, 5
# What a program fetches of its weights before it waits for the kernel before it, in KB.
PREFETCH_KB = 16 if READERS_OVERLAP.value else 0
_WIDE = 16384  # outputs of a head
_LINE = 128  # bytes
_SMALL = 2**22  # bytes of a weight, read in no time


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The Triton form of `kernels.linear.linear`: [T, N] in `dtype`, x's by default.

    More than MOST_ROWS rows go to the library where it can write `dtype`, else so many at a time: on a CPU it cannot
    write float32 of narrower numbers.
    """
    dtype = dtype or x.dtype
    if x.shape[0] > MOST_ROWS:
        if dtype == x.dtype == weight.dtype:
            return F.linear(x, weight, bias)
        if x.is_cuda and dtype == torch.float32 and x.dtype == weight.dtype:
            y = torch.mm(x, weight.T, out_dtype=dtype)
            return y if bias is None else y.add_(bias)
        return torch.cat([linear(rows, weight, bias, dtype) for rows in x.split(MOST_ROWS)])
    if split_inputs(*weight.shape)[0] > 1:
        return sum_parts(linear_parts(x, weight), bias, dtype)
    return _launch(x, weight, bias, dtype)[0]


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x[T, K] @ weight[N, K].T as partial sums, float32 [S, T, N], for the kernel that follows to add up."""
    return _launch(x, weight, None, torch.float32)


def split_inputs(outputs: int, inputs: int) -> tuple[int, int]:
    """How many partial sums an output has, as fill the device, and how many inputs each of them spans."""
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(outputs, _tile_outputs(outputs)))
    splits, blocks = max(1, min(wanted, MOST_SPLITS, inputs // (2 * BLOCK_K))), triton.cdiv(inputs, BLOCK_K)
    # Somewhat more, where they are then as long as each other.
    splits = next((more for more in range(splits, min(2 * splits, MOST_SPLITS + 1)) if blocks % more == 0), splits)
    span = triton.cdiv(blocks, splits)
    return triton.cdiv(blocks, span), span * BLOCK_K


def _tile_outputs(outputs: int) -> int:
    return WIDE_TILE_OUTPUTS if outputs >= _WIDE else TILE_OUTPUTS


def _lines_ahead(tile_outputs: int, span: int, itemsize: int) -> int:
    """How many lines of the cache each output fetches ahead: a power of two, 0 for none."""
    lines = min(PREFETCH_KB * 1024 // tile_outputs, span * itemsize) // _LINE
    return triton.next_power_of_2(lines) if lines else 0


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if weight.shape[1] != inputs or not weight.is_contiguous():
        raise ValueError(f"linear: expected a contiguous weight [N, {inputs}], found {list(weight.shape)}")
    (splits, span), tile = split_inputs(outputs, inputs), _tile_outputs(outputs)
    tile_rows = TILE_ROWS
    if rows > TILE_ROWS:
        tile_rows, tile = MANY_TILE_ROWS, max(tile, MANY_TILE_OUTPUTS)
    out = torch.empty(splits, rows, outputs, dtype=dtype, device=x.device)
    if rows:
        _linear[(triton.cdiv(rows, tile_rows), triton.cdiv(outputs, tile), splits)](
            x,
            weight,
            bias,
            out,
            rows,
            outputs,
            INPUTS=inputs,
            SPAN=span,
            EVEN=splits * span == inputs,
            BLOCK_M=tile_rows,
            BLOCK_N=tile,
            BLOCK_K=BLOCK_K,
            LINES=_lines_ahead(tile, span, weight.element_size()),
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=WARPS,
            num_stages=STAGES if tile == TILE_OUTPUTS else LARGE_STAGES,
            **(LAUNCH if weight.nbytes <= _SMALL else READER_LAUNCH),
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    begin = split * SPAN
    if LINES > 0:
        line = begin + tl.arange(0, LINES) * (1024 // weight.dtype.element_ty.primitive_bitwidth)
        first = weight + tl.minimum(column, outputs - 1)[:, None].to(tl.int64) * INPUTS
        prefetch(first + tl.minimum(line, INPUTS - 1)[None, :])
    reader_after_previous()
    k = begin + tl.arange(0, BLOCK_K)
    x_places = x + row[:, None] * INPUTS + k[None, :]
    weight_places = weight + column[:, None].to(tl.int64) * INPUTS + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for offset in range(0, SPAN, BLOCK_K):
        x_mask, weight_mask = row[:, None] < rows, column[:, None] < outputs
        if not EVEN:
            there = begin + offset + tl.arange(0, BLOCK_K) < INPUTS
            x_mask, weight_mask = x_mask & there[None, :], weight_mask & there[None, :]
        a = tl.load(x_places + offset, mask=x_mask, other=0.0)
        b = tl.load(weight_places + offset, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(a, tl.trans(b.to(a.dtype)), acc, input_precision=PRECISION)
    reader_has_read()
    if bias is not None:
        acc += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    place = (split * rows + row[:, None]).to(tl.int64) * outputs + column[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < outputs))
