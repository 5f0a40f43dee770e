"""MXFP4 mixture of experts, two kernels: gate and up with the gated activation, down with the rank's share.

A program takes one expert, a tile of the rows that chose it, and a tile of its outputs. A pair is a row and one of its
ranks, row * top_k + rank. What `down` leaves are partial sums by rank, [top_k, T, H], for whoever reads them next to
add up in the order of the ranks: no atomics.

Few rows: every pair has programs, those of the first pair of an expert take all its rows, the others leave; so each
expert that was chosen is read once, and nothing has to be sorted. More rows: pairs are sorted by expert and cut into
tiles. Up to MOST_ROWS_OF_SMALL_TILES the tiles and the order of sums are those of few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.mxfp4 import BLOCK
from kernels.triton_forms.mxfp4 import PackedExperts, unpack
from kernels.triton_forms.overlap import LAUNCH, after_previous

FEW_ROWS = 16
MOST_ROWS_OF_SMALL_TILES = 256
GATED_OUTPUTS, DOWN_OUTPUTS = 64, 32
WARPS, STAGES = 4, 6
BLOCKS = 1  # of 32 inputs from each half that are taken at a time: one or two
LARGE_TILE, LARGE_OUTPUTS = 64, 128
LARGE_WARPS, LARGE_STAGES = 4, 3
_SMALL_TILE = 16


@dataclass(frozen=True)
class Activation:
    """clamped_swiglu's constants: plain SwiGLU has alpha 1, no limit and offset 0."""

    alpha: float
    limit: float
    offset: float


@dataclass(frozen=True)
class _Tiles:
    """Which rows go together. Without `order`, few rows: by the ids themselves."""

    rows: int
    count: int
    order: torch.Tensor | None = None
    pair_ends: torch.Tensor | None = None
    tile_ends: torch.Tensor | None = None


def moe_parts(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: Activation,
) -> torch.Tensor:
    """Returns the shares of the chosen experts' outputs, float32 [top_k, T, H], for x[T, H].

    ids, shares: [T, top_k]. gate_up: outputs 2 I, gate and up interleaved; down: outputs H.
    """
    x, (rows, top_k) = x.contiguous(), ids.shape
    activated = torch.empty(rows * top_k, down.shape[2], dtype=x.dtype, device=x.device)
    parts = torch.empty(top_k, rows, down.shape[1], dtype=torch.float32, device=x.device)
    if rows:
        tiles = _tiles(ids, gate_up.shape[0], _tile_rows(rows))
        _launch(x, ids, None, gate_up, activated, tiles, activation)
        _launch(activated, ids, shares, down, parts, tiles, None)
    return parts


def _tile_rows(rows: int) -> int:
    return _SMALL_TILE if rows <= MOST_ROWS_OF_SMALL_TILES else LARGE_TILE


def _tiles(ids: torch.Tensor, experts: int, tile_rows: int) -> _Tiles:
    """Sorts pairs by expert where there are many, without waiting for the device."""
    pairs = ids.numel()
    if ids.shape[0] <= FEW_ROWS:
        return _Tiles(tile_rows, pairs)
    flat = ids.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    tile_ends = torch.div(counts + tile_rows - 1, tile_rows, rounding_mode="floor").cumsum(0)
    order = flat.argsort(stable=True)
    return _Tiles(tile_rows, min(pairs, pairs // tile_rows + experts), order, counts.cumsum(0), tile_ends)


def _launch(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor | None,
    weights: PackedExperts,
    out: torch.Tensor,
    tiles: _Tiles,
    activation: Activation | None,
) -> None:
    experts, outputs, inputs = weights.shape
    small = tiles.rows == _SMALL_TILE
    tile_outputs = (DOWN_OUTPUTS if activation is None else GATED_OUTPUTS) if small else LARGE_OUTPUTS
    gate = activation or Activation(1.0, 0.0, 0.0)
    _experts[(triton.cdiv(outputs, tile_outputs), tiles.count)](
        x,
        ids,
        shares,
        weights.values,
        weights.scales,
        weights.bias,
        out,
        tiles.order,
        tiles.pair_ends,
        tiles.tile_ends,
        ids.shape[0],
        gate.alpha,
        min(gate.limit, 3e38),
        gate.offset,
        OUTPUTS=outputs,
        HALF=inputs // 2,
        EXPERTS=experts,
        EXPERTS_BLOCK=triton.next_power_of_2(experts),
        TOP_K=ids.shape[1],
        GATED=activation is not None,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tile_outputs,
        GROUP=BLOCK,
        BLOCKS=BLOCKS,
        BF16=x.dtype == torch.bfloat16,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=WARPS if small else LARGE_WARPS,
        num_stages=STAGES if small else LARGE_STAGES,
        **LAUNCH,
    )


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
def _rows_of_tile(
    order, pair_ends, tile_ends, tile, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr
):
    """The tile's expert, its pairs [TILE_ROWS], which of them exist, and whether there is such a tile."""
    each = tl.arange(0, EXPERTS_BLOCK)
    ends = tl.load(tile_ends + each, mask=each < EXPERTS, other=0)
    before = (ends <= tile) & (each < EXPERTS)
    exists = tl.sum(before.to(tl.int32), 0) < EXPERTS
    expert = tl.minimum(tl.sum(before.to(tl.int32), 0), EXPERTS - 1).to(tl.int64)
    first_tile = tl.max(tl.where(before, ends, 0), 0)
    begin = tl.load(pair_ends + expert - 1, mask=expert > 0, other=0)
    place = begin + (tile - first_tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    inside = place < tl.load(pair_ends + expert)
    return expert, tl.load(order + place, mask=inside, other=0), inside, exists


@triton.jit(do_not_specialize=["rows"])
def _experts(
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
    HALF: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BF16: tl.constexpr,
    PRECISION: tl.constexpr,
):
    after_previous()
    tile = tl.program_id(1)
    if order is None:
        expert, pairs, inside, exists = _rows_of_first_pair(ids, tile, rows, TOP_K, TILE_ROWS)
    else:
        expert, pairs, inside, exists = _rows_of_tile(
            order, pair_ends, tile_ends, tile, EXPERTS, EXPERTS_BLOCK, TILE_ROWS
        )
    if not exists:
        return

    output = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    in_outputs = output < OUTPUTS
    expert = expert.to(tl.int64)
    values += expert * OUTPUTS * HALF
    scales += expert * OUTPUTS * ((HALF // GROUP + 1) // 2)
    x_row = pairs // TOP_K if GATED else pairs
    x_places = x + x_row.to(tl.int64)[:, None] * (2 * HALF)
    acc = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    for begin in range(0, HALF, GROUP * BLOCKS):
        column = begin + tl.arange(0, GROUP * BLOCKS)
        in_half = column < HALF if BLOCKS > 1 else column >= 0
        x_mask = inside[:, None] & in_half[None, :]
        low_x = tl.load(x_places + column[None, :], mask=x_mask, other=0.0)
        high_x = tl.load(x_places + HALF + column[None, :], mask=x_mask, other=0.0)
        block = begin // GROUP
        word = tl.load(scales + (block // 2) * OUTPUTS + output, mask=in_outputs, other=0) >> (block % 2 * 8)
        scale = word[:, None]
        if BLOCKS > 1:
            scale = scale >> (column // GROUP % 2 * 8)[None, :]
        mask = in_outputs[:, None] & in_half[None, :]
        low, high = unpack(
            values, scale & 0xFF, (scale >> 16) & 0xFF, output, column, HALF, mask, BF16, x.dtype.element_ty
        )  # fmt: skip
        acc = tl.dot(low_x, tl.trans(low), acc, input_precision=PRECISION)
        acc = tl.dot(high_x, tl.trans(high), acc, input_precision=PRECISION)

    if bias is not None:
        acc += tl.load(bias + expert * OUTPUTS + output, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (TILE_ROWS, TILE_OUTPUTS // 2, 2)))
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + offset)
        column = tl.program_id(0) * (TILE_OUTPUTS // 2) + tl.arange(0, TILE_OUTPUTS // 2)
        place = out + pairs.to(tl.int64)[:, None] * (OUTPUTS // 2) + column[None, :]
        mask = inside[:, None] & (column < OUTPUTS // 2)[None, :]
    else:
        result = acc * tl.load(shares + pairs, mask=inside, other=0.0)[:, None]
        part = (pairs % TOP_K) * rows + pairs // TOP_K
        place = out + part.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
        mask = inside[:, None] & in_outputs[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)
