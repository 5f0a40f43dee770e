"""Attention of few rows within a sliding window: unsplit, a program a row and key head.

Blocks of keys begin at the window's own edge, which is no page's: rounded down to one, most rows would read a page
more than they see. Each row has its own edge, so rows do not share blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PAGE_SIZE, LayerCache
from kernels.triton_forms.attention_tile import LOG2_E, add_sink, take_block_in
from kernels.triton_forms.overlap import LAUNCH, after_previous

MOST_KEYS = 128  # of a block
WARPS = 4


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
            TILE=max(16, group_block),
            WIDTH=width,
            BLOCK=max(16, triton.next_power_of_2(width)),
            PAGE=PAGE_SIZE,
            KEYS=min(MOST_KEYS, max(16, triton.next_power_of_2(window))),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=WARPS,
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

    in_group, dims = tl.arange(0, TILE), tl.arange(0, BLOCK)
    head = kv_head * GROUP + in_group
    inside = in_group < GROUP
    vector = (row.to(tl.int64) * KV_HEADS * GROUP + head) * WIDTH
    in_vector = inside[:, None] & (dims[None, :] < WIDTH)
    queries = tl.load(q + vector[:, None] + dims[None, :], mask=in_vector, other=0.0)

    largest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, BLOCK), tl.float32)
    for begin in range(first, last + 1, KEYS):
        key = begin + tl.arange(0, KEYS)
        seen = key <= last
        page = tl.load(page_tables + sequence * table_width + key // PAGE, mask=seen, other=0).to(tl.int64)
        block, offset = (page * KV_HEADS + kv_head) * WIDTH * PAGE, key % PAGE
        k = tl.load(
            keys + block[None, :] + dims[:, None] * PAGE + offset[None, :],
            mask=(dims[:, None] < WIDTH) & seen[None, :],
            other=0.0,
        )
        v = tl.load(
            values + block[:, None] + offset[:, None] * WIDTH + dims[None, :],
            mask=seen[:, None] & (dims[None, :] < WIDTH),
            other=0.0,
        )
        visible = seen[None, :] & inside[:, None]
        largest, total, acc = take_block_in(queries, k, v, visible, scale, largest, total, acc, PRECISION)

    if sinks is not None:
        total, acc = add_sink(sinks, head, inside, largest, total, acc)
    total = tl.where(inside, total, 1.0)
    tl.store(out + vector[:, None] + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=in_vector)
