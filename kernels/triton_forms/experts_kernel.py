"""The kernel of the experts: one of them, a tile of its outputs, and a tile of the rows that chose it."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_forms.mxfp4 import shuffled_place
from kernels.triton_forms.mxfp4_products import product_of_few, product_of_many


@triton.jit
def _rows_of_first_pair(ids, pair, rows, TOP_K: tl.constexpr, TILE_ROWS: tl.constexpr):
    """The pair's expert, its pairs [TILE_ROWS], which of them exist, and whether this pair is the first of them."""
    expert = tl.load(ids + pair)
    row = tl.arange(0, TILE_ROWS)
    pairs, inside, earlier = row * TOP_K, row < 0, tl.zeros((TILE_ROWS,), tl.int32)
    for rank in tl.static_range(TOP_K):
        other = row * TOP_K + rank
        same = tl.load(ids + other, mask=row < rows, other=-1) == expert
        pairs, inside = tl.where(same, other, pairs), inside | same
        earlier += (same & (other < pair)).to(tl.int32)
    return expert, pairs, inside, tl.sum(earlier, 0) == 0


@triton.jit
def _find_tile(pair_ends, tile_ends, tile, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr):
    """The tile's expert, where its sorted pairs begin, where the expert's end, and whether there is such a tile."""
    each = tl.arange(0, EXPERTS_BLOCK)
    ends = tl.load(tile_ends + each, mask=each < EXPERTS, other=0)
    before = (ends <= tile) & (each < EXPERTS)
    exists = tl.sum(before.to(tl.int32), 0) < EXPERTS
    expert = tl.minimum(tl.sum(before.to(tl.int32), 0), EXPERTS - 1).to(tl.int64)
    first_tile = tl.max(tl.where(before, ends, 0), 0)
    begin = tl.load(pair_ends + expert - 1, mask=expert > 0, other=0)
    return expert, begin + (tile - first_tile) * TILE_ROWS, tl.load(pair_ends + expert), exists


@triton.jit
def _rows_at(order, place, end, TILE_ROWS: tl.constexpr):
    """The pairs [TILE_ROWS] at a place, and which of them exist."""
    places = place + tl.arange(0, TILE_ROWS)
    inside = places < end
    return tl.load(order + places, mask=inside, other=0).to(tl.int32), inside


@triton.jit(do_not_specialize=["rows"])
def compute_experts(
    x,
    ids,
    shares,
    values,
    scales,
    bias,
    out,
    order,
    pair_ends,
    tile_ends,
    rows,
    alpha,
    limit,
    offset,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPAN: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    SMALL: tl.constexpr,
    UNROLLED: tl.constexpr,
    BF16: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(1)
    if order is None:
        expert, pairs, inside, exists = _rows_of_first_pair(ids, tile, rows, TOP_K, TILE_ROWS)
    else:
        expert, place, end, exists = _find_tile(pair_ends, tile_ends, tile, EXPERTS, EXPERTS_BLOCK, TILE_ROWS)
        pairs, inside = _rows_at(order, place, end, TILE_ROWS)
    if not exists:
        return
    if order is not None and TILE_ROWS > 8 and end - place <= TILE_ROWS // 2:
        # Half of the products would be of rows that are not there.
        few_pairs, are_inside = _rows_at(order, place, end, TILE_ROWS // 2)
        _compute(
            x,
            expert,
            few_pairs,
            are_inside,
            shares,
            values,
            scales,
            bias,
            out,
            rows,
            alpha,
            limit,
            offset,
            OUTPUTS,
            INPUTS,
            SPAN,
            TOP_K,
            SPLITS,
            GATED,
            TILE_ROWS // 2,
            TILE_OUTPUTS,
            SMALL,
            UNROLLED,
            BF16,
            PRECISION,
        )
    else:
        _compute(
            x,
            expert,
            pairs,
            inside,
            shares,
            values,
            scales,
            bias,
            out,
            rows,
            alpha,
            limit,
            offset,
            OUTPUTS,
            INPUTS,
            SPAN,
            TOP_K,
            SPLITS,
            GATED,
            TILE_ROWS,
            TILE_OUTPUTS,
            SMALL,
            UNROLLED,
            BF16,
            PRECISION,
        )


@triton.jit
def _compute(
    x,
    expert,
    pairs,
    inside,
    shares,
    values,
    scales,
    bias,
    out,
    rows,
    alpha,
    limit,
    offset,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPAN: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    SMALL: tl.constexpr,
    UNROLLED: tl.constexpr,
    BF16: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One expert's tile of outputs, of its `pairs` [TILE_ROWS] that are `inside`."""
    split = tl.program_id(2)
    STEPS: tl.constexpr = INPUTS // 64
    TILES: tl.constexpr = (OUTPUTS + 15) // 16
    expert = expert.to(tl.int64)
    first_tile = tl.program_id(0) * (TILE_OUTPUTS // 16)
    lane = tl.arange(0, 2 * TILE_OUTPUTS)
    # A last tile of outputs that is not there is the one before it once more.
    of_outputs = tl.minimum(first_tile + lane // 32, TILES - 1)
    value_places = values + expert * (TILES * STEPS * 512) + of_outputs * (STEPS * 512) + lane % 32 * 16
    scale_places = scales + expert * (TILES * STEPS * 8) + of_outputs * (STEPS * 8) + lane % 32 // 4
    # Rows that are not there are the first once more: nobody stores what becomes of them.
    x_row = tl.where(inside, pairs // TOP_K if GATED else pairs, 0)
    begin, end = split * SPAN, tl.minimum((split + 1) * SPAN, STEPS)
    if SMALL:
        acc = product_of_few(
            x,
            value_places,
            scale_places,
            x_row,
            begin,
            end,
            INPUTS,
            TILE_ROWS,
            TILE_OUTPUTS,
            UNROLLED,
            BF16,
            PRECISION,
        )
    else:
        acc = product_of_many(
            x, value_places, scale_places, x_row, begin, end, INPUTS, TILE_ROWS, TILE_OUTPUTS, BF16, PRECISION
        )

    of_tile = tl.arange(0, TILE_OUTPUTS)
    output = tl.program_id(0) * TILE_OUTPUTS + of_tile
    if GATED:  # rows of the tile are eight gates, then their ups
        output += of_tile % 8 + of_tile // 8 % 2 - of_tile % 16 + of_tile % 8
    in_outputs = output < OUTPUTS
    if bias is not None:
        biases = tl.load(bias + expert * OUTPUTS + output, mask=in_outputs, other=0.0).to(tl.float32)
        acc += tl.where(split == 0, biases, 0.0)[:, None]
    if GATED:
        halves = tl.reshape(acc, (TILE_OUTPUTS // 16, 2, 8, TILE_ROWS)).permute(0, 2, 3, 1)
        gate, up = tl.split(halves)
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        gated = gate / (1.0 + tl.exp(-alpha * gate)) * (up + offset)
        result = tl.reshape(gated, (TILE_OUTPUTS // 2, TILE_ROWS))
        column = tl.program_id(0) * (TILE_OUTPUTS // 2) + tl.arange(0, TILE_OUTPUTS // 2)
        in_row = column if SMALL else shuffled_place(column)
        place = out + (pairs[None, :] * (OUTPUTS // 2) + in_row[:, None])
        mask = inside[None, :] & (column < OUTPUTS // 2)[:, None]
    else:
        result = acc * tl.load(shares + pairs, mask=inside, other=0.0)[None, :]
        part = (pairs % TOP_K * SPLITS + split) * rows + pairs // TOP_K
        place = out + (part[None, :] * OUTPUTS + output[:, None])
        mask = inside[None, :] & in_outputs[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)
