"""Attention of few rows over many keys: split over keys at fixed absolute positions, then merged in that order.

A program takes a few rows of one chain, all query heads that share a key head, and one split of the keys. Every
row of a tile sees the blocks that it would see alone, and more that leave it as it is, so its bits are its own. Sinks
come in once, in the merge. Partial results lie in float32 [T, nq, splits, d], their largest logits and totals in
[T, nq, splits, 2].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PAGE_SIZE, LayerCache
from kernels.triton_forms.attention_tile import LOG2_E, add_sink, load_page, take_block_in
from kernels.triton_forms.overlap import LAUNCH, after_previous

PAGES_PER_SPLIT = 8
TILE = 16  # rows of a tile's matrices: the least that the matrix units take
WARPS, STAGES = 4, 3
_LOOKBACK = 32  # the longest chain whose tiles do not overlap
_MERGED = 16  # splits that are merged at a time


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
    splits = triton.cdiv(page_tables.shape[1], PAGES_PER_SPLIT)
    parts = torch.empty(rows, heads, splits, width, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    block = max(16, triton.next_power_of_2(width))
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
        TILE=max(TILE, group_block),
        WIDTH=width,
        BLOCK=block,
        PAGE=PAGE_SIZE,
        PAGES=PAGES_PER_SPLIT,
        LOOKBACK=_LOOKBACK,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=WARPS,
        num_stages=STAGES,
        **LAUNCH,
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
        MERGED=_MERGED,
        num_warps=1,
        **LAUNCH,
    )
    return out


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
    PAGES: tl.constexpr,
    LOOKBACK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    after_previous()
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(sequences + row)
    # Every (TILE / GROUP_BLOCK)-th row of its sequence leads a tile; the others have nothing to do.
    before = row - 1 - tl.arange(0, LOOKBACK)
    place_in_chain = tl.sum((tl.load(sequences + before, mask=before >= 0, other=-1) == sequence).to(tl.int32), 0)
    if place_in_chain % (TILE // GROUP_BLOCK) != 0:
        return

    member = tl.arange(0, TILE)
    tile_row, in_group = row + member // GROUP_BLOCK, member % GROUP_BLOCK
    inside = (tile_row < rows) & (in_group < GROUP)
    inside = inside & (tl.load(sequences + tile_row, mask=inside, other=-1) == sequence)
    own = tl.load(positions + tile_row, mask=inside, other=-1)
    last = tl.max(own, 0)
    if split * PAGES * PAGE > last:
        return
    first = 0
    if first_positions is not None:
        first = tl.load(first_positions + sequence)

    dims, slots = tl.arange(0, BLOCK), tl.arange(0, PAGE)
    head = kv_head * GROUP + in_group
    vector = (tile_row.to(tl.int64) * KV_HEADS * GROUP + head) * WIDTH
    in_vector = inside[:, None] & (dims[None, :] < WIDTH)
    queries = tl.load(q + vector[:, None] + dims[None, :], mask=in_vector, other=0.0)

    largest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, BLOCK), tl.float32)
    table = page_tables + sequence.to(tl.int64) * table_width
    for index in range(tl.maximum(split * PAGES, first // PAGE), tl.minimum((split + 1) * PAGES, last // PAGE + 1)):
        k, value_places = load_page(keys, values, tl.load(table + index), kv_head, KV_HEADS, WIDTH, BLOCK, PAGE)
        key = index * PAGE + slots
        # A freed page may hold anything: what no row sees is not to be multiplied, not even by zero.
        seen = (key >= first) & (key <= last)
        v = tl.load(value_places, mask=seen[:, None] & (dims[None, :] < WIDTH), other=0.0)
        visible = (key[None, :] >= first) & (key[None, :] <= own[:, None])
        largest, total, acc = take_block_in(queries, k, v, visible, scale, largest, total, acc, PRECISION)

    place = (tile_row.to(tl.int64) * KV_HEADS * GROUP + head) * splits + split
    tl.store(parts + place[:, None] * WIDTH + dims[None, :], acc, mask=in_vector)
    tl.store(stats + place * 2, largest, mask=inside)
    tl.store(stats + place * 2 + 1, total, mask=inside)


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
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
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
    if sinks is not None:
        total, acc = add_sink(sinks, head + one, one == 0, largest, total, acc)
    result = acc / total[:, None]
    place = vector * WIDTH + one[:, None] + dims[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=in_width[None, :])
