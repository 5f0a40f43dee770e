"""MXFP4 mixture of experts, two kernels: gate and up with the gated activation, down with the rank's share.

A program takes one expert, a tile of its outputs, and a tile of the rows that chose it. A pair is a row and one of its
ranks, row * top_k + rank. What `down` leaves are partial sums, [top_k * splits, T, H], for whoever reads them next to
add up in the order of ranks, and of the spans of inputs within a rank: no atomics.

Few rows: every pair has programs, those of the first pair of an expert take all its rows, the others leave; so each
expert that was chosen is read once, and nothing has to be sorted. More rows: pairs are sorted by expert and cut into
tiles; one that is not half full is computed as half a tile. Up to MOST_ROWS_OF_SMALL_TILES the order of sums is that of
few rows: how many columns a product has changes no column's bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernels.triton_forms import mxfp4
from kernels.triton_forms.experts_kernel import compute_experts
from kernels.triton_forms.mxfp4 import PackedExperts, shuffled
from kernels.triton_forms.pairs import sort_pairs

FEW_ROWS = 16
MOST_ROWS_OF_SMALL_TILES = 512
SMALL_OUTPUTS, BATCH_OUTPUTS = 16, 64  # of a tile: with several rows each, more outputs read them less often
SHORT_TILE, LONG_TILE = 8, 16  # rows of a tile
MOST_ROWS_OF_SHORT_TILES = 128  # of a batch: of 128 experts each is chosen by four
UNROLLED, BATCH_UNROLLED = 5, 3  # tiles of inputs that are on their way to a warp
# Of a thread at most. With one row few programs leave room, but the compiler would load some tiles after the first
# products; of long tiles three warps fit then, where two would.
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
    limited = ids.shape[0] == 1 or (small and not few and tiles.rows == LONG_TILE)
    steps = inputs // mxfp4.INPUTS
    gate = activation or Activation(1.0, 0.0, 0.0)
    compute_experts[(triton.cdiv(outputs, tile_outputs), tiles.count, splits)](
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
        **({"maxnreg": REGISTERS} if limited else {}),
        num_warps=1 if small else LARGE_WARPS,
        num_stages=1 if small else LARGE_STAGES,
    )
