"""Attention of the many rows of a prompt's chunk: a program takes the rows of one block of positions, unsplit.

A tile is so many rows times all query heads that share a key head, so that keys are read once for all of them. Tiles
lie at fixed absolute positions, and so do blocks of keys, of which those that every row of the tile sees are taken in
without a mask: a row's bits do not depend on where a chunk begins or ends. They are not those of the decode form: a
row that is computed again as part of a prompt differs by rounding.
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
    take_block_in,
)

TILE = 128  # rows times heads of a group
KEYS = 64  # of a block: one, two or four pages
WARPS, STAGES = 8, 3
REGISTERS = 128  # of a thread at most: two programs of eight warps fit a multiprocessor


def prefill_attention(
    q: torch.Tensor,
    cache: LayerCache,
    page_tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    first_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention output [T, nq, d] of q[T, nq, d]; a sequence's rows stand together, in one order."""
    rows, heads, width = q.shape
    kv_heads = cache.keys.shape[1]
    out = torch.empty_like(q)
    if rows:
        group_block = triton.next_power_of_2(heads // kv_heads)
        tile, block = max(TILE, group_block), max(16, triton.next_power_of_2(width))
        _attend_prefill[(triton.cdiv(rows, tile // group_block), kv_heads)](
            q,
            cache.keys,
            cache.values,
            page_tables,
            sequences,
            positions,
            first_positions,
            sinks,
            out,
            scale * LOG2_E,
            window,
            rows,
            page_tables.stride(0),
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            GROUP_BLOCK=group_block,
            TILE=tile,
            KEYS=KEYS,
            WIDTH=width,
            BLOCK=block,
            PAGE=PAGE_SIZE,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            **launch_options(WARPS, STAGES, REGISTERS, block * q.element_size()),
        )
    return out


@triton.jit(do_not_specialize=["rows", "table_width"])
def _attend_prefill(
    q,
    keys,
    values,
    page_tables,
    sequences,
    positions,
    first_positions,
    sinks,
    out,
    scale,
    window,
    rows,
    table_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program takes the tiles whose first rows are among its own: one as a rule, more where sequences meet."""
    TILE_ROWS: tl.constexpr = TILE // GROUP_BLOCK
    # The last rows see the most keys: they go first.
    kv_head, own_rows = tl.program_id(1), (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_ROWS
    place = own_rows + tl.arange(0, TILE_ROWS)
    here, behind = place < rows, (place > 0) & (place < rows)
    tile = tl.load(positions + place, mask=here, other=0) // TILE_ROWS
    goes_on = tl.load(positions + place - 1, mask=behind, other=-1) // TILE_ROWS == tile
    goes_on &= tl.load(sequences + place - 1, mask=behind, other=-1) == tl.load(sequences + place, mask=here, other=-1)
    leads = here & ~(behind & goes_on)

    row = own_rows - 1
    for _ in range(tl.sum(leads.to(tl.int32), 0)):
        row = tl.min(tl.where(leads & (place > row), place, rows), 0)
        sequence = tl.load(sequences + row)
        member = tl.arange(0, TILE)
        tile_row, in_group = row + member // GROUP_BLOCK, member % GROUP_BLOCK
        inside = (tile_row < rows) & (in_group < GROUP)
        begin = tl.load(positions + row) // TILE_ROWS * TILE_ROWS
        own = tl.load(positions + tile_row, mask=inside, other=-1)
        inside &= (tl.load(sequences + tile_row, mask=inside, other=-1) == sequence) & (own >= begin)
        inside &= own < begin + TILE_ROWS
        own = tl.where(inside, own, -1)
        first = 0
        if first_positions is not None:
            first = tl.load(first_positions + sequence)
        edge = tl.zeros((TILE,), tl.int32) + first
        if window is not None:
            edge = tl.maximum(edge, own - window + 1)
        last = tl.max(own, 0)
        lowest = tl.min(tl.where(inside, edge, last), 0)
        blocks_end = last // KEYS + 1
        # Blocks that every row of the whole tile sees, whichever rows of it are here; in a window there are few.
        full_begin, full_end = blocks_end, blocks_end
        if window is None:
            full_begin = tl.cdiv(first, KEYS)
            full_end = tl.maximum(full_begin, (begin + 1) // KEYS)

        dims = tl.arange(0, BLOCK)
        head = kv_head * GROUP + in_group
        vector = (tile_row.to(tl.int64) * KV_HEADS * GROUP + head) * WIDTH
        in_vector = inside[:, None] & (dims[None, :] < WIDTH)
        queries = tl.load(q + vector[:, None] + dims[None, :], mask=in_vector, other=0.0)
        largest, total = begin_softmax(sinks, head, inside)
        acc = tl.zeros((TILE, BLOCK), tl.float32)
        table = page_tables + sequence.to(tl.int64) * table_width
        for part in tl.static_range(3 if window is None else 1):
            if part == 0:
                start, stop = lowest // KEYS, tl.minimum(full_begin, blocks_end)
            elif part == 1:
                start, stop = full_begin, full_end
            else:
                start, stop = full_end, blocks_end
            largest, total, acc = _take_blocks_in(
                start,
                stop,
                queries,
                keys,
                values,
                table,
                kv_head,
                edge,
                own,
                lowest,
                last,
                scale,
                largest,
                total,
                acc,
                part != 1,
                KV_HEADS,
                KEYS,
                WIDTH,
                BLOCK,
                PAGE,
                PRECISION,
            )

        tl.store(out + vector[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=in_vector)


@triton.jit
def _take_blocks_in(
    start,
    stop,
    queries,
    keys,
    values,
    table,
    kv_head,
    edge,
    own,
    lowest,
    last,
    scale,
    largest,
    total,
    acc,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes blocks of keys start..stop-1 in. Pages are looked up a block ahead, so that no load waits for its page."""
    dims, slots = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    pages = pages_of(table, start * (KEYS // PAGE), last // PAGE, KEYS // PAGE)
    for index in range(start, stop):
        k_places, v_places = block_places(keys, values, pages, kv_head, KV_HEADS, KEYS, WIDTH, BLOCK, PAGE)
        pages = pages_of(table, (index + 1) * (KEYS // PAGE), last // PAGE, KEYS // PAGE)
        k = tl.load(k_places, mask=dims[:, None] < WIDTH, other=0.0)
        if MASKED:
            key = index * KEYS + slots
            # A freed page may hold anything: what no row sees is not to be multiplied, not even by zero.
            seen = (key >= lowest) & (key <= last)
            v = tl.load(v_places, mask=seen[:, None] & (dims[None, :] < WIDTH), other=0.0)
            visible = (key[None, :] >= edge[:, None]) & (key[None, :] <= own[:, None])
            largest, total, acc = take_block_in(queries, k, v, visible, scale, largest, total, acc, PRECISION)
        else:
            v = tl.load(v_places, mask=dims[None, :] < WIDTH, other=0.0)
            largest, total, acc = take_block_in(queries, k, v, None, scale, largest, total, acc, PRECISION)
    return largest, total, acc
