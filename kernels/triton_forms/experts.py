"""MXFP4 mixture of experts, two kernels: gate and up with the gated activation, down with the rank's share.

A program takes one expert, a tile of its outputs, and a tile of the rows that chose it. A pair is a row and one of its
ranks, row * top_k + rank. What `down` leaves are partial sums, [top_k * splits, T, H], for whoever reads them next to
add up in the order of ranks, and of the spans of inputs within a rank: no atomics.

Few rows: every pair has programs, those of the first pair of an expert take all its rows, the others leave; so each
expert that was chosen is read once, and nothing has to be sorted. More rows: pairs are sorted by expert and cut into
tiles. Up to MOST_ROWS_OF_SMALL_TILES the order of sums is that of few rows: how many columns a product has changes no
column's bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton_forms import mxfp4
from kernels.triton_forms.mxfp4 import PackedExperts, shuffled, shuffled_place
from kernels.triton_forms.mxfp4_products import product_of_few, product_of_many
from kernels.triton_forms.pairs import sort_pairs

FEW_ROWS = 16
MOST_ROWS_OF_SMALL_TILES = 512
SMALL_OUTPUTS, BATCH_OUTPUTS = 16, 64  # of a tile: with several rows each, more outputs read them less often
SHORT_TILE, LONG_TILE = 8, 16  # rows of a tile
MOST_ROWS_OF_SHORT_TILES = 128  # of a batch: of 128 experts each is chosen by four
UNROLLED, BATCH_UNROLLED = 5, 3  # tiles of inputs that are on their way to a warp
# Of a thread at most, where few programs leave room: the compiler otherwise loads some tiles after the first products.
REGISTERS = 168
SPLITS = 3  # spans of the inputs of down: it has half as many outputs as gate and up
LARGE_TILE, LARGE_OUTPUTS = 128, 256
LARGE_WARPS, LARGE_STAGES = 8, 3
_MOST_NUMBERS = 2**31 - 1  # places are 32 bits wide


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
    """Returns partial sums of the chosen experts' outputs, by their shares, float32 [S, T, H], for x[T, H].

    ids, shares: [T, top_k]. gate_up: outputs 2 I, gates and ups in turn; down: outputs H.
    """
    x, (rows, top_k) = x.contiguous(), ids.shape
    small = rows <= MOST_ROWS_OF_SMALL_TILES
    splits = _splits(down.shape[2]) if small else 1
    x = x if small else shuffled(x)
    activated = torch.empty(rows * top_k, down.shape[2], dtype=x.dtype, device=x.device)
    parts = torch.empty(top_k * splits, rows, down.shape[1], dtype=torch.float32, device=x.device)
    if parts.numel() > _MOST_NUMBERS:
        raise ValueError(f"experts: expected at most {_MOST_NUMBERS} numbers of partial sums, found {parts.numel()}")
    if rows:
        tiles = _tiles(ids, gate_up.shape[0], _tile_rows(rows))
        _launch(x, ids, None, gate_up, activated, tiles, activation, 1, small)
        _launch(activated, ids, shares, down, parts, tiles, None, splits, small)
    return parts


def _splits(inputs: int) -> int:
    """How many spans, of whole tiles, there are of so many inputs; no row's number of neighbours changes it."""
    steps = inputs // mxfp4.INPUTS
    return triton.cdiv(steps, triton.cdiv(steps, SPLITS))


def _tile_rows(rows: int) -> int:
    if rows > MOST_ROWS_OF_SMALL_TILES:
        return LARGE_TILE
    short = rows <= SHORT_TILE or FEW_ROWS < rows <= MOST_ROWS_OF_SHORT_TILES
    return SHORT_TILE if short else LONG_TILE


def _tiles(ids: torch.Tensor, experts: int, tile_rows: int) -> _Tiles:
    """Sorts pairs by expert where there are many, without waiting for the device."""
    pairs = ids.numel()
    if ids.shape[0] <= FEW_ROWS:
        return _Tiles(tile_rows, pairs)
    return _Tiles(tile_rows, min(pairs, pairs // tile_rows + experts), *sort_pairs(ids, experts, tile_rows))


def _launch(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor | None,
    weights: PackedExperts,
    out: torch.Tensor,
    tiles: _Tiles,
    activation: Activation | None,
    splits: int,
    small: bool,
) -> None:
    experts, outputs, inputs = weights.shape
    few = tiles.order is None
    tile_outputs = LARGE_OUTPUTS if not small else SMALL_OUTPUTS if few else BATCH_OUTPUTS
    unrolled = UNROLLED if few else BATCH_UNROLLED
    steps = inputs // mxfp4.INPUTS
    gate = activation or Activation(1.0, 0.0, 0.0)
    _experts[(triton.cdiv(outputs, tile_outputs), tiles.count, splits)](
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
        INPUTS=inputs,
        SPAN=triton.cdiv(steps, splits),
        EXPERTS=experts,
        EXPERTS_BLOCK=triton.next_power_of_2(experts),
        TOP_K=ids.shape[1],
        SPLITS=splits,
        GATED=activation is not None,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tile_outputs,
        SMALL=small,
        UNROLLED=unrolled if steps % (splits * unrolled) == 0 else 1,
        BF16=x.dtype == torch.bfloat16,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **({"maxnreg": REGISTERS} if ids.shape[0] == 1 else {}),
        num_warps=1 if small else LARGE_WARPS,
        num_stages=1 if small else LARGE_STAGES,
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
    return expert, tl.load(order + place, mask=inside, other=0).to(tl.int32), inside, exists


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
    tile, split = tl.program_id(1), tl.program_id(2)
    if order is None:
        expert, pairs, inside, exists = _rows_of_first_pair(ids, tile, rows, TOP_K, TILE_ROWS)
    else:
        expert, pairs, inside, exists = _rows_of_tile(
            order, pair_ends, tile_ends, tile, EXPERTS, EXPERTS_BLOCK, TILE_ROWS
        )
    STEPS: tl.constexpr = INPUTS // 64
    TILES: tl.constexpr = (OUTPUTS + 15) // 16
    expert = expert.to(tl.int64)
    first_tile = tl.program_id(0) * (TILE_OUTPUTS // 16)
    if not exists:
        return

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
