"""Attention of few rows over many keys: split over keys at fixed absolute positions, then merged in that order.

A program takes a few rows of one chain, all query heads that share a key head, and one split of the keys, whose pages
are under way together. Its products are transposed, keys and dimensions by rows, so that the matrix units read keys
and values where they were put, and a row's bits are its columns', whatever stands in the others. Blocks that it does
not see leave it as it is. Sinks come in once, in the merge. Partial results lie in float32 [T, nq, splits, d], their
largest logits and totals in [T, nq, splits, 2].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PAGE_SIZE, LayerCache
from kernels.triton_forms.attention_tile import (
    LOG2_E,
    begin_softmax,
    block_places,
    launch_options,
    pages_of,
    take_few_in,
)
from kernels.triton_forms.overlap import LAUNCH, after_previous

PAGES_PER_SPLIT = 4
KEYS = 64  # of a block: one, two or four pages
LEAST_TILE, MOST_TILE = 16, 64  # rows times heads of a group
WARPS, STAGES = 4, 4
REGISTERS = 168  # of a thread at most: three programs of four warps fit a multiprocessor
MERGED = 64  # splits that are merged at a time
MERGE_WARPS = 4
_LOOKBACK = 32  # the longest chain whose tiles do not overlap


def split_attention(
    q: torch.Tensor,
    cache: LayerCache,
    page_tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    first_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention output [T, nq, d] of q[T, nq, d] without a window; rows of a sequence stand together.

    As many splits are launched as the page tables have room for: narrower tables, fewer programs that find no work.
    """
    rows, heads, width = q.shape
    kv_heads = cache.keys.shape[1]
    out = torch.empty_like(q)
    if not rows:
        return out
    group = heads // kv_heads
    group_block = triton.next_power_of_2(group)
    block = max(16, triton.next_power_of_2(width))
    tile, splits = _tile(rows, group_block, q.dtype), triton.cdiv(page_tables.shape[1], PAGES_PER_SPLIT)
    stages = STAGES if tile < 64 else STAGES - 1  # three programs still fit, and no bit changes
    parts = torch.empty(rows, heads, splits, width, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    _attend_split[(rows, kv_heads, splits)](
        q,
        cache.keys,
        cache.values,
        page_tables,
        sequences,
        positions,
        first_positions,
        parts,
        stats,
        scale * LOG2_E,
        rows,
        page_tables.stride(0),
        splits,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_BLOCK=group_block,
        TILE=tile,
        WIDTH=width,
        BLOCK=block,
        PAGE=PAGE_SIZE,
        KEYS=KEYS,
        SPAN=PAGE_SIZE * PAGES_PER_SPLIT,
        LOOKBACK=_LOOKBACK,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **launch_options(WARPS, stages, REGISTERS, block * q.element_size()),
    )
    _merge_splits[(rows, heads)](
        parts,
        stats,
        sinks,
        positions,
        out,
        splits,
        HEADS=heads,
        WIDTH=width,
        BLOCK=block,
        SPAN=PAGE_SIZE * PAGES_PER_SPLIT,
        MERGED=MERGED,
        num_warps=MERGE_WARPS,
        **LAUNCH,
    )
    return out


def _tile(rows: int, group_block: int, dtype: torch.dtype) -> int:
    """Columns of a tile: all of a chain's where that may be, so that its keys are read once.

    Tiles of every size give the same bits on the matrix units; products in float32 are computed elsewhere.
    """
    most = LEAST_TILE if dtype == torch.float32 else min(MOST_TILE, triton.next_power_of_2(rows) * group_block)
    return max(LEAST_TILE, group_block, most)


@triton.jit(do_not_specialize=["rows", "table_width", "splits"])
def _attend_split(
    q,
    keys,
    values,
    page_tables,
    sequences,
    positions,
    first_positions,
    parts,
    stats,
    scale,
    rows,
    table_width,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    LOOKBACK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    after_previous()
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(sequences + row)
    before = row - 1 - tl.arange(0, LOOKBACK)
    place_in_chain = tl.sum((tl.load(sequences + before, mask=before >= 0, other=-1) == sequence).to(tl.int32), 0)
    member = tl.arange(0, TILE)
    tile_row, in_group = row + member // GROUP_BLOCK, member % GROUP_BLOCK
    inside = (tile_row < rows) & (in_group < GROUP)
    own = tl.load(positions + tile_row, mask=inside, other=-1)
    inside &= tl.load(sequences + tile_row, mask=inside, other=-1) == sequence
    own = tl.where(inside, own, -1)
    last = tl.max(own, 0)
    first = 0
    if first_positions is not None:
        first = tl.load(first_positions + sequence)
    # Every (TILE / GROUP_BLOCK)-th row of its sequence leads a tile; the others have nothing to do.
    if (place_in_chain % (TILE // GROUP_BLOCK) != 0) | (split * SPAN > last):
        return

    dims, slots = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    head = kv_head * GROUP + in_group
    vector = (tile_row.to(tl.int64) * KV_HEADS * GROUP + head) * WIDTH
    in_vector = (dims[:, None] < WIDTH) & inside[None, :]
    queries = tl.load(q + vector[None, :] + dims[:, None], mask=in_vector, other=0.0)
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    totals = tl.zeros((KEYS, TILE), tl.float32)
    acc = tl.zeros((BLOCK, TILE), tl.float32)
    table = page_tables + sequence.to(tl.int64) * table_width
    start = tl.maximum(split * (SPAN // KEYS), first // KEYS)
    pages = pages_of(table, start * (KEYS // PAGE), last // PAGE, KEYS // PAGE)
    for index in range(start, tl.minimum((split + 1) * (SPAN // KEYS), last // KEYS + 1)):
        k_places, v_places = block_places(keys, values, pages, kv_head, KV_HEADS, KEYS, WIDTH, BLOCK, PAGE)
        # Looked up a block ahead: no load waits for its page.
        pages = pages_of(table, (index + 1) * (KEYS // PAGE), last // PAGE, KEYS // PAGE)
        k = tl.load(k_places, mask=dims[:, None] < WIDTH, other=0.0)
        key = index * KEYS + slots
        # A freed page may hold anything: what no row sees is not to be multiplied, not even by zero.
        seen = (key >= first) & (key <= last)
        v = tl.load(v_places, mask=seen[:, None] & (dims[None, :] < WIDTH), other=0.0)
        visible = (key[:, None] >= first) & (key[:, None] <= own[None, :])
        largest, totals, acc = take_few_in(queries, k, v, visible, scale, largest, totals, acc, PRECISION)

    place = (tile_row.to(tl.int64) * KV_HEADS * GROUP + head) * splits + split
    tl.store(parts + place[None, :] * WIDTH + dims[:, None], acc, mask=in_vector)
    tl.store(stats + place * 2, largest, mask=inside)
    tl.store(stats + place * 2 + 1, tl.sum(totals, 0), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def _merge_splits(
    parts,
    stats,
    sinks,
    positions,
    out,
    splits,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    MERGED: tl.constexpr,
):
    after_previous()
    row, head = tl.program_id(0), tl.program_id(1)
    vector = row.to(tl.int64) * HEADS + head
    dims, one = tl.arange(0, BLOCK), tl.arange(0, 1)
    in_width = dims < WIDTH
    own_splits = tl.load(positions + row) // SPAN + 1
    largest, total = begin_softmax(sinks, head + one, one == 0)
    acc = tl.zeros((1, BLOCK), tl.float32)
    for begin in range(0, own_splits, MERGED):
        split = begin + tl.arange(0, MERGED)
        own = split < own_splits
        place = vector * splits + split
        part_largest = tl.load(stats + place * 2, mask=own, other=float("-inf"))
        part_total = tl.load(stats + place * 2 + 1, mask=own, other=0.0)
        part = tl.load(parts + place[:, None] * WIDTH + dims[None, :], mask=own[:, None] & in_width[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(part_largest, 0))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        kept = tl.exp2(largest - reference)
        weights = tl.exp2(part_largest - tl.max(reference, 0))
        total = total * kept + tl.sum(weights * part_total, 0)
        acc = acc * kept[:, None] + tl.sum(weights[:, None] * part, 0)[None, :]
        largest = new_largest
    result = acc / total[:, None]
    place = vector * WIDTH + one[:, None] + dims[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=in_width[None, :])
