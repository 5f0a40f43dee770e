"""What lies between the qkv projection and attention, in one pass: a program a row and head.

It adds up the projection's partial sums and bias, normalises query and key heads where the model does (Qwen3), turns
them by their position, and writes keys and values to their place in the paged cache. Every step is rounded where the
PyTorch form rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PAGE_SIZE, LayerCache
from kernels.triton_forms.overlap import LAUNCH, after_previous, fetch_ahead, programs_ahead
from kernels.triton_forms.parts import bias_of, sum_parts_of_row

_LINES = 256  # that a program fetches ahead


def rope_and_write(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    sequences: torch.Tensor,
    page_tables: torch.Tensor,
    cache: LayerCache,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the turned queries [T, nq, d] and stores the rows' keys and values.

    parts: [S, T, (nq + 2 nkv) d], in float32 or in the cache's dtype. cos, sin: float32 [positions, d / 2].
    positions, sequences: int32 [T]. page_tables: int32 [sequences, P]. q_norm, k_norm: [d], both or neither.
    ahead: what other programs bring into the L2 cache meanwhile (`overlap.beginning`).
    """
    parts = parts.contiguous()
    num_parts, rows, outputs = parts.shape
    _, kv_heads, width, _ = cache.keys.shape
    if outputs != (num_heads + 2 * kv_heads) * width:
        raise ValueError(f"qkv: expected {(num_heads + 2 * kv_heads) * width} outputs, found {outputs}")
    q = torch.empty(rows, num_heads, width, dtype=cache.keys.dtype, device=parts.device)
    if rows:
        # The first row's heads, then the next one's: after them come the programs that fetch ahead.
        _rope_and_write[(rows * (num_heads + 2 * kv_heads) + programs_ahead(ahead, _LINES),)](
            parts,
            bias,
            cos,
            sin,
            q_norm,
            k_norm,
            positions,
            sequences,
            page_tables,
            q,
            cache.keys,
            cache.values,
            ahead,
            eps,
            rows,
            page_tables.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=kv_heads,
            HALF=width // 2,
            PAGE=PAGE_SIZE,
            NUM_PARTS=num_parts,
            BLOCK=triton.next_power_of_2(width // 2),
            LINES=_LINES,
            num_warps=1,
            **LAUNCH,
        )
    return q


@triton.jit(do_not_specialize=["rows", "table_width"])
def _rope_and_write(
    parts,
    bias,
    cos,
    sin,
    q_norm,
    k_norm,
    positions,
    sequences,
    page_tables,
    q,
    keys,
    values,
    ahead,
    eps,
    rows,
    table_width,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
):
    num_heads: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    if ahead is not None and tl.program_id(0) >= rows * num_heads:
        fetch_ahead(ahead, tl.program_id(0) - rows * num_heads, LINES)
        return
    row, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    width = num_heads * 2 * HALF
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    column = head * 2 * HALF + pair
    dtype = keys.dtype.element_ty

    # Loads that depend on each other come before the wait.
    position, sequence = tl.load(positions + row), tl.load(sequences + row).to(tl.int64)
    first_bias, second_bias = bias_of(bias, column, inside), bias_of(bias, column + HALF, inside)
    angle = position.to(tl.int64) * HALF + pair
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    page = tl.load(page_tables + sequence * table_width + position // PAGE).to(tl.int64)
    after_previous()

    first = (sum_parts_of_row(parts, row, rows, width, column, inside, NUM_PARTS) + first_bias).to(dtype)
    second = (sum_parts_of_row(parts, row, rows, width, column + HALF, inside, NUM_PARTS) + second_bias).to(dtype)
    if head < NUM_HEADS + NUM_KV_HEADS:
        x, y = first.to(tl.float32), second.to(tl.float32)
        if q_norm is not None:
            scale = 1.0 / tl.sqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / (2 * HALF) + eps)
            norm = q_norm
            if head >= NUM_HEADS:
                norm = k_norm
            x = x * scale * tl.load(norm + pair, mask=inside, other=0.0).to(tl.float32)
            y = y * scale * tl.load(norm + HALF + pair, mask=inside, other=0.0).to(tl.float32)
            x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
        first, second = (x * c - y * s).to(dtype), (y * c + x * s).to(dtype)

    if head < NUM_HEADS:
        place = q + (row.to(tl.int64) * NUM_HEADS + head) * 2 * HALF + pair
        tl.store(place, first, mask=inside)
        tl.store(place + HALF, second, mask=inside)
    else:
        offset = position % PAGE
        if head < NUM_HEADS + NUM_KV_HEADS:
            block = page * NUM_KV_HEADS + (head - NUM_HEADS)
            place = keys + (block * 2 * HALF + pair) * PAGE + offset
            tl.store(place, first, mask=inside)
            tl.store(place + HALF * PAGE, second, mask=inside)
        else:
            block = page * NUM_KV_HEADS + (head - NUM_HEADS - NUM_KV_HEADS)
            place = values + (block * PAGE + offset) * 2 * HALF + pair
            tl.store(place, first, mask=inside)
            tl.store(place + HALF, second, mask=inside)
