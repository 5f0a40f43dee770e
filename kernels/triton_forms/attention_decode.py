"""Attention of few rows over many keys: split over keys at fixed absolute positions, then merged in that order.

A program takes a few rows of one chain, all query heads that share a key head, and one split of the keys, whose pages
are under way together. Its products are transposed, keys and dimensions by rows, so that the matrix units read keys
and values where they were put, and a row's bits are its columns', whatever stands in the others. Blocks that it does
not see leave it as it is. Sinks come in once, in the merge. Partial results lie in float32 [T, nq, splits, d], their
largest logits and totals in [T, nq, splits, 2].

Where chains and key heads alone fill the device, a program takes all splits of its rows and merges them itself: the
same operations in the same order, without partial results in memory. How many chains there are is a hint only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PAGE_SIZE, LayerCache
from kernels.triton_forms.attention_merge import merge_splits
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
    take_split_in,
)
from kernels.triton_forms.overlap import after_previous

PAGES_PER_SPLIT = 4
KEYS = 64  # of a block: one, two or four pages
LEAST_TILE, MOST_TILE = 16, 64  # rows times heads of a group
BATCH_TILE = 32  # of several chains, of four rows or so each
WARPS, STAGES = 4, 4
REGISTERS = 168  # of a thread at most: three programs of four warps fit a multiprocessor
BATCH_STAGES, BATCH_REGISTERS = 3, 128  # four fit
PROGRAMS = 300  # at least, before rows share theirs
WHOLE_PROGRAMS = 256  # at least, of rows that share theirs, before they take all splits; twice as many are launched
WHOLE_SPLITS = 8  # and at most so many: the longest sequence would be waited for


def split_attention(
    q: torch.Tensor,
    cache: LayerCache,
    page_tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    first_positions: torch.Tensor | None = None,
    num_chains: int | None = None,
) -> torch.Tensor:
    """Returns the attention output [T, nq, d] of q[T, nq, d] without a window; rows of a sequence stand together.

    As many splits are launched as the page tables have room for: narrower tables, fewer programs that find no work.
    num_chains: None, chains of SHARING rows are assumed.
    """
    rows, heads, width = q.shape
    kv_heads = cache.keys.shape[1]
    out = torch.empty_like(q)
    if not rows:
        return out
    group = heads // kv_heads
    group_block, block = triton.next_power_of_2(group), max(16, triton.next_power_of_2(width))
    tile, splits = _tile(rows, group_block, q.dtype), triton.cdiv(page_tables.shape[1], PAGES_PER_SPLIT)
    batch, chains = rows > FEW_ROWS, num_chains or triton.cdiv(rows, SHARING)
    whole = batch and splits <= WHOLE_SPLITS and chains * kv_heads >= WHOLE_PROGRAMS
    shared = rows_of_program(rows, *((kv_heads, 2 * WHOLE_PROGRAMS) if whole else (kv_heads * splits, PROGRAMS)))
    stages, registers = (BATCH_STAGES, BATCH_REGISTERS) if batch else (STAGES, REGISTERS)
    # Of no rows where none are needed, so that a kernel is compiled once.
    parts = torch.empty(0 if whole else rows, heads, splits, width, dtype=torch.float32, device=q.device)
    stats = torch.empty(0 if whole else rows, heads, splits, 2, dtype=torch.float32, device=q.device)
    _attend_split[(triton.cdiv(rows, shared), kv_heads, 1 if whole else splits)](
        q,
        cache.keys,
        cache.values,
        page_tables,
        sequences,
        positions,
        first_positions,
        sinks,
        parts,
        stats,
        out,
        scale * LOG2_E,
        rows,
        shared,
        page_tables.stride(0),
        splits,
        int(whole),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_BLOCK=group_block,
        SHARING=SHARING,
        BATCH=batch,
        TILE=tile,
        WIDTH=width,
        BLOCK=block,
        PAGE=PAGE_SIZE,
        KEYS=KEYS,
        SPAN=PAGE_SIZE * PAGES_PER_SPLIT,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        # Three programs with wide tiles still fit with a stage less.
        **launch_options(WARPS, min(stages, 3) if tile >= 64 else stages, registers, block * q.element_size()),
    )
    if not whole:
        merge_splits(parts, stats, sinks, positions, PAGE_SIZE * PAGES_PER_SPLIT, out)
    return out


def _tile(rows: int, group_block: int, dtype: torch.dtype) -> int:
    """Columns of a tile: all of a chain's where that may be, so that its keys are read once.

    Tiles of every size give the same bits on the matrix units; products in float32 are computed elsewhere.
    """
    most = min(MOST_TILE, triton.next_power_of_2(rows) * group_block) if rows <= FEW_ROWS else BATCH_TILE
    return max(LEAST_TILE, group_block, LEAST_TILE if dtype == torch.float32 else most)


@triton.jit(do_not_specialize=["rows", "shared", "table_width", "splits", "whole"])
def _attend_split(
    q,
    keys,
    values,
    page_tables,
    sequences,
    positions,
    first_positions,
    sinks,
    parts,
    stats,
    out,
    scale,
    rows,
    shared,
    table_width,
    splits,
    whole,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SHARING: tl.constexpr,
    BATCH: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    after_previous()
    begin, kv_head, split = tl.program_id(0) * shared, tl.program_id(1), tl.program_id(2)
    end = tl.minimum(begin + shared, rows)
    place, leads = leading_rows(sequences, begin, end, SHARING, TILE // GROUP_BLOCK)
    row = begin - 1
    for _ in range(tl.sum(leads.to(tl.int32), 0)):
        row = tl.min(tl.where(leads & (place > row), place, end), 0)
        tile = rows_of_tile(sequences, positions, row, rows, GROUP, GROUP_BLOCK, TILE)
        sequence, tile_row, in_group, inside, own = tile
        last, first = tl.max(own, 0), None
        if first_positions is not None:
            first = tl.load(first_positions + sequence)
        if split * SPAN <= last:
            dims, head = tl.arange(0, BLOCK)[:, None], kv_head * GROUP + in_group[None, :]
            vector, exists = tile_row.to(tl.int64)[None, :] * KV_HEADS * GROUP + head, inside[None, :]
            in_vector = (dims < WIDTH) & exists
            queries = tl.load(q + vector * WIDTH + dims, mask=in_vector, other=0.0)
            table = page_tables + sequence.to(tl.int64) * table_width
            if not BATCH:
                largest, total, acc = _attend_one(
                    queries, keys, values, table, kv_head, split, own, first, last, scale,
                    KV_HEADS, TILE, WIDTH, BLOCK, PAGE, KEYS, SPAN, PRECISION,
                )  # fmt: skip
            else:
                largest, total = begin_softmax(None, head, exists)
                acc = tl.zeros((BLOCK, TILE), tl.float32)
                begin_split, end_split = split, split + 1
                if whole:
                    largest, total = begin_softmax(sinks, head, exists)
                    end_split = last // SPAN + 1
                    if first is not None:
                        begin_split = first // SPAN
                for index in range(begin_split, end_split):
                    part_largest, part_total, part = _attend_one(
                        queries, keys, values, table, kv_head, index, own, first, last, scale,
                        KV_HEADS, TILE, WIDTH, BLOCK, PAGE, KEYS, SPAN, PRECISION,
                    )  # fmt: skip
                    largest, total, acc = take_split_in(largest, total, acc, part_largest, part_total, part)
            if BATCH and whole:
                tl.store(out + vector * WIDTH + dims, (acc / total).to(out.dtype.element_ty), mask=in_vector)
            else:
                vector = vector * splits + split
                tl.store(parts + vector * WIDTH + dims, acc, mask=in_vector)
                tl.store(stats + vector * 2, largest, mask=exists)
                tl.store(stats + vector * 2 + 1, total, mask=exists)


@triton.jit
def _attend_one(
    queries,
    keys,
    values,
    table,
    kv_head,
    split,
    own,
    first,
    last,
    scale,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(largest [1, TILE], total [1, TILE], acc [BLOCK, TILE]) of one split.

    Columns see keys up to their own positions, from `first`, where there is one.
    """
    dims, slots = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    totals = tl.zeros((KEYS, TILE), tl.float32)
    acc = tl.zeros((BLOCK, TILE), tl.float32)
    start = split * (SPAN // KEYS)
    if first is not None:
        start = tl.maximum(start, first // KEYS)
    pages = pages_of(table, start * (KEYS // PAGE), last // PAGE, KEYS // PAGE)
    for index in range(start, tl.minimum((split + 1) * (SPAN // KEYS), last // KEYS + 1)):
        k_places, v_places = block_places(keys, values, pages, kv_head, KV_HEADS, KEYS, WIDTH, BLOCK, PAGE)
        # Looked up a block ahead: no load waits for its page.
        pages = pages_of(table, (index + 1) * (KEYS // PAGE), last // PAGE, KEYS // PAGE)
        k = tl.load(k_places, mask=dims[:, None] < WIDTH, other=0.0)
        key = index * KEYS + slots
        # A freed page may hold anything: what no row sees is not to be multiplied, not even by zero.
        seen, visible = key <= last, key[:, None] <= own[None, :]
        if first is not None:
            seen, visible = seen & (key >= first), visible & (key[:, None] >= first)
        v = tl.load(v_places, mask=seen[:, None] & (dims[None, :] < WIDTH), other=0.0)
        largest, totals, acc = take_few_in(queries, k, v, visible, scale, largest, totals, acc, PRECISION)
    return largest[None, :], tl.sum(totals, 0, keep_dims=True), acc
