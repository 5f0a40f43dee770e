"""Products of MXFP4 weights, a tile of outputs, with few rows or with many: what a program of the experts computes.

The weights go from memory through registers into the matrix units (`mxfp4.py` says how they lie). `values` and `scales`
are where each lane's 16 bytes and its word of scales stand, [2 TILE_OUTPUTS]; x_row: rows of x [rows, INPUTS], int32
[TILE_ROWS]; begin, end: tiles of inputs. Both add up a tile of inputs after the other, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_forms.mxfp4 import load_tile, unpack


@triton.jit
def product_of_few(
    x,
    values,
    scales,
    x_row,
    begin,
    end,
    INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    UNROLLED: tl.constexpr,
    BF16: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[TILE_OUTPUTS, TILE_ROWS]: one warp, whose threads read what they multiply with, and share nothing."""
    # [t, row, low or high, one of eight]: in this order of dimensions a thread loads what it multiplies with.
    of_lane = tl.arange(0, 4)[:, None, None, None] * 8 + tl.arange(0, 2)[None, None, :, None] * 32
    of_lane += tl.arange(0, 8)[None, None, None, :]
    x_places = x + (x_row[None, :, None, None] * INPUTS + of_lane)
    acc = tl.zeros((TILE_OUTPUTS, TILE_ROWS), tl.float32)
    for first in range(begin, end, UNROLLED):
        packed, words, columns = (), (), ()
        for one in tl.static_range(UNROLLED):
            packed += (load_tile(values + (first + one) * 512),)  # type: ignore[assignment]
            words += (tl.load(scales + (first + one) * 8),)  # type: ignore[assignment]
            columns += (tl.load(x_places + (first + one) * 64),)  # type: ignore[assignment]
        for one in tl.static_range(UNROLLED):
            weights = unpack(packed[one], words[one], False, BF16, x.dtype.element_ty)
            # [t, row, block, word, low or high, one of two], as inputs and rows.
            fragments = tl.reshape(columns[one], (4, TILE_ROWS, 2, 2, 2, 2))
            fragments = fragments.permute(2, 4, 0, 3, 5, 1).reshape(64, TILE_ROWS)
            acc = tl.dot(weights, fragments, acc, input_precision=PRECISION)
    return acc


@triton.jit
def product_of_many(
    x,
    values,
    scales,
    x_row,
    begin,
    end,
    INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    BF16: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[TILE_OUTPUTS, TILE_ROWS], of x whose inputs are `shuffled`."""
    x_places = x + (x_row[None, :] * INPUTS + tl.arange(0, 64)[:, None])
    acc = tl.zeros((TILE_OUTPUTS, TILE_ROWS), tl.float32)
    for step in range(begin, end):
        columns = tl.load(x_places + step * 64)
        packed, words = load_tile(values + step * 512), tl.load(scales + step * 8)
        weights = unpack(packed, words, True, BF16, x.dtype.element_ty)
        acc = tl.dot(weights, columns, acc, input_precision=PRECISION)
    return acc
