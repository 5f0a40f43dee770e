"""Attention of few rows within a sliding window: unsplit, a program a few rows of one chain and a key head.

Blocks of keys are pages, from that of the first row's edge to that of the last row. A page that a row does not see
leaves it as it is, so that its bits do not depend on the others in its tile. A window of 128 keys lies in three pages
at most, which are all under way together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PAGE_SIZE, LayerCache
from kernels.triton_forms.attention_tile import (
    FEW_ROWS,
    LOG2_E,
    SHARING,
    begin_softmax,
    block_places,
    launch_options,
    leading_rows,
    pages_of,
    rows_of_program,
    rows_of_tile,
    take_few_in,
)
from kernels.triton_forms.overlap import LAUNCH, after_previous

FEW_TILE, TILE = 16, 32  # rows times heads of a group, of one chain, and of several
WARPS, STAGES = 4, 4  # a stage more than blocks that are under way
REGISTERS = 168  # of a thread at most: three programs of four warps fit a multiprocessor
BATCH_STAGES, BATCH_REGISTERS = 3, 128  # four fit
PROGRAMS = 64  # at least, before rows share theirs


def window_attention(
    q: torch.Tensor,
    cache: LayerCache,
    page_tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None = None,
    first_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention output [T, nq, d] of q[T, nq, d] over the last `window` keys, the row's own included."""
    rows, heads, width = q.shape
    kv_heads = cache.keys.shape[1]
    out = torch.empty_like(q)
    if rows:
        group_block = triton.next_power_of_2(heads // kv_heads)
        block = max(16, triton.next_power_of_2(width))
        few = rows <= FEW_ROWS
        stages, registers = (STAGES, REGISTERS) if few else (BATCH_STAGES, BATCH_REGISTERS)
        shared = 1 if few else rows_of_program(rows, kv_heads, PROGRAMS)
        _attend_window[(triton.cdiv(rows, shared), kv_heads)](
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
            rows,
            shared,
            window,
            page_tables.stride(0),
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            GROUP_BLOCK=group_block,
            SHARING=1 if few else SHARING,
            TILE=max(16, FEW_TILE if few else TILE, group_block),
            WIDTH=width,
            BLOCK=block,
            PAGE=PAGE_SIZE,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            **launch_options(WARPS, stages, registers, block * q.element_size()),
            **LAUNCH,
        )
    return out


@triton.jit(do_not_specialize=["rows", "shared", "table_width"])
def _attend_window(
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
    rows,
    shared,
    window,
    table_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SHARING: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    begin, kv_head = tl.program_id(0) * shared, tl.program_id(1)
    end = tl.minimum(begin + shared, rows)
    # What only depends on the step's inputs comes before the wait.
    place, leads = leading_rows(sequences, begin, end, SHARING, TILE // GROUP_BLOCK)
    row = tl.min(tl.where(leads, place, end), 0)
    tile = _tile_of(
        row, sequences, positions, first_positions, page_tables, rows, window, table_width,
        GROUP, GROUP_BLOCK, TILE, PAGE,
    )  # fmt: skip
    after_previous()
    for _ in range(tl.sum(leads.to(tl.int32), 0)):
        tile_row, in_group, inside, own, edge, lowest, last, table, pages = tile
        dims, slots = tl.arange(0, BLOCK), tl.arange(0, PAGE)
        head = kv_head * GROUP + in_group
        places = (tile_row.to(tl.int64) * KV_HEADS * GROUP + head)[None, :] * WIDTH + dims[:, None]
        in_vectors = inside[None, :] & (dims[:, None] < WIDTH)
        queries = tl.load(q + places, mask=in_vectors, other=0.0)
        largest, total = begin_softmax(sinks, head, inside)
        totals = tl.where(slots[:, None] == 0, total[None, :], 0.0)
        acc = tl.zeros((BLOCK, TILE), tl.float32)
        for index in range(lowest // PAGE, last // PAGE + 1):
            k_places, v_places = block_places(keys, values, pages, kv_head, KV_HEADS, PAGE, WIDTH, BLOCK, PAGE)
            # Looked up a page ahead: no load waits for its page.
            pages = pages_of(table, index + 1, last // PAGE, 1)
            k = tl.load(k_places, mask=dims[:, None] < WIDTH, other=0.0)
            key = index * PAGE + slots
            # A freed page may hold anything: what no row sees is not to be multiplied, not even by zero.
            seen = (key >= lowest) & (key <= last)
            v = tl.load(v_places, mask=seen[:, None] & (dims[None, :] < WIDTH), other=0.0)
            visible = (key[:, None] >= edge[None, :]) & (key[:, None] <= own[None, :])
            largest, totals, acc = take_few_in(queries, k, v, visible, scale, largest, totals, acc, PRECISION)
        result = acc / tl.sum(totals, 0)[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=in_vectors)
        if SHARING > 1:
            row = tl.min(tl.where(leads & (place > row), place, end), 0)
            tile = _tile_of(
                row, sequences, positions, first_positions, page_tables, rows, window, table_width,
                GROUP, GROUP_BLOCK, TILE, PAGE,
            )  # fmt: skip


@triton.jit
def _tile_of(
    row,
    sequences,
    positions,
    first_positions,
    page_tables,
    rows,
    window,
    table_width,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The rows from `row`, what they see, and their first page; where there is no such row, those of the last one."""
    row = tl.minimum(row, rows - 1)
    sequence, tile_row, in_group, inside, own = rows_of_tile(sequences, positions, row, rows, GROUP, GROUP_BLOCK, TILE)
    edge = tl.maximum(own - window + 1, 0)
    if first_positions is not None:
        edge = tl.maximum(edge, tl.load(first_positions + sequence))
    last = tl.max(own, 0)
    lowest = tl.min(tl.where(inside, edge, last), 0)
    table = page_tables + sequence.to(tl.int64) * table_width
    pages = pages_of(table, lowest // PAGE, last // PAGE, 1)
    return tile_row, in_group, inside, own, edge, lowest, last, table, pages
