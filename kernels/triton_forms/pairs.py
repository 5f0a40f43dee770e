"""Pairs, of a row and an expert that it chose, sorted by expert and cut into tiles: two kernels, a program an expert.

Each counts its pairs, then each knows where its own begin, and writes them in the order in which it finds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_forms.overlap import LAUNCH, after_previous

FEW_PAIRS, MANY_PAIRS = 1024, 4096  # that are looked at together
PAIRS_A_WARP = 256


def sort_pairs(ids: torch.Tensor, experts: int, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (order, pair_ends, tile_ends) for ids[T, top_k], the chosen experts.

    order, int32 [T * top_k]: the pairs, row * top_k + rank, by expert and then by number. pair_ends, tile_ends, int32
    [experts]: where in `order` each expert's pairs end, and where its tiles, of up to tile_rows pairs, do.
    """
    ids, pairs = ids.contiguous(), ids.numel()
    counts, pair_ends, tile_ends = ids.new_empty(3, experts, dtype=torch.int32)
    order = ids.new_empty(pairs, dtype=torch.int32)
    block = FEW_PAIRS if pairs <= FEW_PAIRS else MANY_PAIRS
    options = {"BLOCK": block, "num_warps": block // PAIRS_A_WARP, **LAUNCH}
    _count[(experts,)](ids, counts, pairs, **options)
    _place[(experts,)](
        ids,
        counts,
        order,
        pair_ends,
        tile_ends,
        pairs,
        experts,
        TILE_ROWS=tile_rows,
        EXPERTS_BLOCK=triton.next_power_of_2(experts),
        **options,
    )
    return order, pair_ends, tile_ends


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    after_previous()
    count = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        count += (tl.load(ids + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["pairs"])
def _place(
    ids,
    counts,
    order,
    pair_ends,
    tile_ends,
    pairs,
    experts,
    TILE_ROWS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert, each = tl.program_id(0), tl.arange(0, EXPERTS_BLOCK)
    after_previous()
    count = tl.load(counts + each, mask=each < experts, other=0)
    if expert == 0:
        tl.store(pair_ends + each, tl.cumsum(count, 0), mask=each < experts)
        tl.store(tile_ends + each, tl.cumsum((count + TILE_ROWS - 1) // TILE_ROWS, 0), mask=each < experts)
    place = tl.sum(tl.where(each < expert, count, 0), 0)
    for begin in range(0, pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        own = (tl.load(ids + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - 1, pair, mask=own == 1)
        place += tl.sum(own, 0)
