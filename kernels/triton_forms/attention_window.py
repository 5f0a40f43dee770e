"""Attention of few rows within a sliding window: unsplit, a program a row and key head.

Blocks of keys begin at the page of the window's own edge, so that each row has its own and shares them with none. A
window of 128 keys lies in three pages at most, which are all under way together.
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

KEYS = 64  # of a block: one, two or four pages
WARPS, STAGES = 4, 4  # a stage more than blocks that are under way
REGISTERS = 168  # of a thread at most: three programs of four warps fit a multiprocessor


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
        block = max(16, triton.next_power_of_2(width))
        _attend_window[(rows, kv_heads)](
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
            page_tables.stride(0),
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            TILE=max(16, triton.next_power_of_2(heads // kv_heads)),
            WIDTH=width,
            BLOCK=block,
            PAGE=PAGE_SIZE,
            KEYS=KEYS,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            **launch_options(WARPS, STAGES, REGISTERS, block * q.element_size()),
            **LAUNCH,
        )
    return out


@triton.jit(do_not_specialize=["table_width"])
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
    window,
    table_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    after_previous()
    row, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences + row).to(tl.int64)
    last = tl.load(positions + row)
    first = tl.maximum(last - window + 1, 0)
    if first_positions is not None:
        first = tl.maximum(first, tl.load(first_positions + sequence))

    in_group, dims, slots = tl.arange(0, TILE), tl.arange(0, BLOCK), tl.arange(0, KEYS)
    head = kv_head * GROUP + in_group
    inside = in_group < GROUP
    places = (row.to(tl.int64) * KV_HEADS * GROUP + head)[None, :] * WIDTH + dims[:, None]
    in_vectors = inside[None, :] & (dims[:, None] < WIDTH)
    queries = tl.load(q + places, mask=in_vectors, other=0.0)
    largest, total = begin_softmax(sinks, head, inside)
    totals = tl.where(slots[:, None] == 0, total[None, :], 0.0)
    acc = tl.zeros((BLOCK, TILE), tl.float32)
    table = page_tables + sequence * table_width
    first_page, last_page = first // PAGE, last // PAGE
    pages = pages_of(table, first_page, last_page, KEYS // PAGE)
    for begin in range(first_page, last_page + 1, KEYS // PAGE):
        k_places, v_places = block_places(keys, values, pages, kv_head, KV_HEADS, KEYS, WIDTH, BLOCK, PAGE)
        # Looked up a block ahead: no load waits for its page.
        pages = pages_of(table, begin + KEYS // PAGE, last_page, KEYS // PAGE)
        touched = begin + slots // PAGE <= last_page
        k = tl.load(k_places, mask=(dims[:, None] < WIDTH) & touched[None, :], other=0.0)
        key = begin * PAGE + slots
        # A freed page may hold anything: what the row does not see is not to be multiplied, not even by zero.
        seen = (key >= first) & (key <= last)
        v = tl.load(v_places, mask=seen[:, None] & (dims[None, :] < WIDTH), other=0.0)
        visible = seen[:, None] & inside[None, :]
        largest, totals, acc = take_few_in(queries, k, v, visible, scale, largest, totals, acc, PRECISION)

    result = acc / tl.sum(totals, 0)[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=in_vectors)
