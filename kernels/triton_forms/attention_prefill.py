"""Attention of the many rows of a prompt's chunk: a program takes the rows of one block of positions, unsplit.

Blocks of rows lie at fixed absolute positions, and so do those of keys, so that a row's bits do not depend on where a
chunk begins or ends. They are not those of the decode form: a row that is computed again as part of a prompt differs
by rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PAGE_SIZE, LayerCache
from kernels.triton_forms.attention_tile import LOG2_E, add_sink, load_page, take_block_in

TILE = 128  # rows times heads of a group
WARPS, STAGES = 8, 3


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
        _attend_prefill[(rows, kv_heads)](
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
            TILE=max(TILE, group_block),
            WIDTH=width,
            BLOCK=max(16, triton.next_power_of_2(width)),
            PAGE=PAGE_SIZE,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=WARPS,
            num_stages=STAGES,
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
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TILE_ROWS: tl.constexpr = TILE // GROUP_BLOCK
    row, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences + row)
    tile = tl.load(positions + row) // TILE_ROWS
    # The first row of a block of positions leads its tile; the others have nothing to do.
    if row > 0:
        previous = tl.load(positions + row - 1) // TILE_ROWS
        if (tl.load(sequences + row - 1) == sequence) & (previous == tile):
            return

    member = tl.arange(0, TILE)
    tile_row, in_group = row + member // GROUP_BLOCK, member % GROUP_BLOCK
    inside = (tile_row < rows) & (in_group < GROUP)
    own = tl.load(positions + tile_row, mask=inside, other=-1)
    inside = inside & (tl.load(sequences + tile_row, mask=inside, other=-1) == sequence) & (own // TILE_ROWS == tile)
    last = tl.max(tl.where(inside, own, -1), 0)
    first = 0
    if first_positions is not None:
        first = tl.load(first_positions + sequence)
    edge = tl.zeros((TILE,), tl.int32) + first
    if window is not None:
        edge = tl.maximum(edge, own - window + 1)
    lowest = tl.min(tl.where(inside, edge, last), 0)

    dims, slots = tl.arange(0, BLOCK), tl.arange(0, PAGE)
    head = kv_head * GROUP + in_group
    vector = (tile_row.to(tl.int64) * KV_HEADS * GROUP + head) * WIDTH
    in_vector = inside[:, None] & (dims[None, :] < WIDTH)
    queries = tl.load(q + vector[:, None] + dims[None, :], mask=in_vector, other=0.0)

    largest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, BLOCK), tl.float32)
    table = page_tables + sequence.to(tl.int64) * table_width
    for index in range(lowest // PAGE, last // PAGE + 1):
        k, value_places = load_page(keys, values, tl.load(table + index), kv_head, KV_HEADS, WIDTH, BLOCK, PAGE)
        key = index * PAGE + slots
        seen = (key >= lowest) & (key <= last)
        v = tl.load(value_places, mask=seen[:, None] & (dims[None, :] < WIDTH), other=0.0)
        visible = (key[None, :] >= edge[:, None]) & (key[None, :] <= own[:, None]) & inside[:, None]
        largest, total, acc = take_block_in(queries, k, v, visible, scale, largest, total, acc, PRECISION)

    if sinks is not None:
        total, acc = add_sink(sinks, head, inside, largest, total, acc)
    total = tl.where(inside, total, 1.0)
    tl.store(out + vector[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=in_vector)
