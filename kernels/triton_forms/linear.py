"""Linear layers of few rows: bound by reading the weight, which every program does once, a tile of outputs each.

A program is one warp. The weight is the left operand, the rows are the right one, and both go from memory straight
into the registers that mma.m16n8k16 takes them from: lane 4 g + t has outputs g and g + 8, or row g, and inputs 2 t,
2 t + 1, 2 t + 8 and 2 t + 9 of sixteen. In which order inputs are added up is free, and chosen such that lane t has
8 t .. 8 t + 7 of 64 inputs, and the same of their second half: two loads of 16 bytes.

The splits of the inputs follow from the weight's shape alone, and every number of rows goes through the same
instructions in the same order, so a row's bits are its own. From MOST_ROWS on the library's product is faster, and its
bits are not those of few rows.

Heads, and inputs that cannot be split evenly, go through shared memory instead, in tiles of 16, 32 or 64 rows whether
they are there or not: one of 64 reads a weight once, which two of 32 read twice, the second time out of the L2 cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.triton_forms.overlap import LAUNCH, after_previous
from kernels.triton_forms.parts import sum_parts

MOST_ROWS = 64
BLOCK_K = 64  # inputs of a step
# At least so many tiles' programs; a constant, since the splits follow from it. Through shared memory one takes about
# 0.25 us for its 4 KB a step, and fewer than three on each of an H200's 132 multiprocessors do not fill the bandwidth.
PROGRAMS = 352
MOST_SPLITS = 16
WARP_OUTPUTS, MOST_WARP_ROWS = 16, 64
UNROLLED = 16  # steps whose loads may be under way at once
REGISTERS = 255  # at most. Nothing said, the compiler takes 72 of 8 rows, for 8 loads at once; so 128, for 24
TILE_ROWS, MOST_TILE_ROWS = 16, 64  # of 64 the compiler takes `wgmma`, which gives the bits of `mma`
TILE_OUTPUTS, MANY_TILE_OUTPUTS, WIDE_TILE_OUTPUTS = 32, 64, 64
WARPS = 4
# One less is on its way: 7 of 4 KB a program, two programs and more a multiprocessor, where 27 KB hide the latency.
STAGES, LARGE_STAGES = 8, 5
_WIDE = 16384  # outputs of a head
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


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if weight.shape[1] != inputs or not weight.is_contiguous():
        raise ValueError(f"linear: expected a contiguous weight [N, {inputs}], found {list(weight.shape)}")
    splits, span = split_inputs(outputs, inputs)
    out = torch.empty(splits, rows, outputs, dtype=dtype, device=x.device)
    if rows:
        launch = _launch_warps if outputs < _WIDE and splits * span == inputs else _launch_tiles
        launch(x, weight, bias, out, span, "ieee" if x.dtype == torch.float32 else "tf32")
    return out


def _options(weight: torch.Tensor) -> dict[str, bool]:
    return LAUNCH if weight.nbytes <= _SMALL else {}


def _launch_warps(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, span: int, precision: str
) -> None:
    (splits, rows, outputs), steps = out.shape, span // BLOCK_K
    most_rows, unrolled = MOST_WARP_ROWS, max(count for count in range(1, UNROLLED + 1) if steps % count == 0)
    if x.dtype == torch.float32:  # without matrix units, and registers for more
        most_rows, unrolled = 16, 1
    tile_rows = min(max(8, triton.next_power_of_2(rows)), most_rows)
    _linear[(splits, triton.cdiv(rows, tile_rows), triton.cdiv(outputs, WARP_OUTPUTS))](
        x,
        weight,
        bias,
        out,
        rows,
        outputs,
        INPUTS=weight.shape[1],
        SPAN=span,
        STEP=BLOCK_K,
        TILE_ROWS=tile_rows,
        TILE_OUTPUTS=WARP_OUTPUTS,
        UNROLLED=unrolled,
        PRECISION=precision,
        num_warps=1,
        num_stages=1,
        maxnreg=REGISTERS,
        **_options(weight),
    )


def _launch_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, span: int, precision: str
) -> None:
    (splits, rows, outputs), inputs = out.shape, weight.shape[1]
    tile_rows, tile = min(max(TILE_ROWS, triton.next_power_of_2(rows)), MOST_TILE_ROWS), _tile_outputs(outputs)
    if rows > TILE_ROWS:
        tile = max(tile, MANY_TILE_OUTPUTS)
    _linear_by_tiles[(triton.cdiv(rows, tile_rows), triton.cdiv(outputs, tile), splits)](
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
        PRECISION=precision,
        num_warps=WARPS,
        num_stages=STAGES if tile == TILE_OUTPUTS else LARGE_STAGES,
        **_options(weight),
    )


@triton.jit
def _as_fragments(loaded, dtype: tl.constexpr):
    """[N, 64], inputs in their order of being added up, of [t, N, half, 8]: the same registers by other names."""
    pairs = loaded.to(dtype).reshape(4, loaded.shape[1], 2, 4, 2)
    return pairs.permute(1, 3, 2, 0, 4).reshape(loaded.shape[1], 64)


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
    STEP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    UNROLLED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Programs of one multiprocessor, 132 apart, have the same split of the rows, and find it in its cache.
    split = tl.program_id(0)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tl.program_id(2) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    # Rows and outputs that are not there are the last once more: nobody stores what becomes of them.
    of_row = tl.minimum(row, rows - 1) * INPUTS + split * SPAN
    of_output = tl.minimum(output, outputs - 1) * INPUTS + split * SPAN
    after_previous()
    # [t, row or output, half, one of eight]: in this order of dimensions a thread loads what it multiplies with.
    of_lane = tl.arange(0, 4)[:, None, None, None] * 8 + tl.arange(0, 2)[None, None, :, None] * 32
    of_lane += tl.arange(0, 8)[None, None, None, :]
    x_places = x + (of_row[None, :, None, None] + of_lane)
    weight_places = weight + (of_output[None, :, None, None] + of_lane)
    acc = tl.zeros((TILE_OUTPUTS, TILE_ROWS), tl.float32)
    for first in range(0, SPAN, UNROLLED * STEP):
        weights, columns = (), ()
        for one in tl.static_range(UNROLLED):
            place = first + one * STEP
            weights += (tl.load(weight_places + place, eviction_policy="evict_first"),)  # type: ignore[assignment]
            columns += (tl.load(x_places + place),)  # type: ignore[assignment]
        for one in tl.static_range(UNROLLED):
            left = _as_fragments(weights[one], x.dtype.element_ty)
            right = _as_fragments(columns[one], x.dtype.element_ty)
            acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
    if bias is not None:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    place = (split * rows + row[None, :]) * outputs + output[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(row[None, :] < rows) & (output[:, None] < outputs))


@triton.jit(do_not_specialize=["rows"])
def _linear_by_tiles(
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
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    begin = split * SPAN
    after_previous()
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
    if bias is not None:
        acc += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    place = (split * rows + row[:, None]).to(tl.int64) * outputs + column[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < outputs))
