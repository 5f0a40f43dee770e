"""What lies between the qkv projection and attention, in one pass.

It adds up the projection's partial sums and bias, normalises query and key heads where the model does (Qwen3), turns
them by their position, and writes keys and values to their place in the paged cache. Every step is rounded where the
PyTorch form rounds.

Few rows: a program a row and head, or a few of a row's heads, so that sixteen bytes are loaded at a time. Many: a
program takes a tile of rows and the heads that share a key head. The rows' angles are then read once for all these
heads, and keys, whose positions are innermost, are written in runs. What is computed of an element is the same, but for
the order of a head norm's sum: with norms a program takes one head of however many rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PAGE_SIZE, LayerCache
from kernels.triton_forms.overlap import LAUNCH, after_previous
from kernels.triton_forms.parts import bias_of, sum_parts_of_row

MOST_ROWS_ALONE = 256  # that have programs of their own
FEW_ROWS = 8  # of which every head has
HEADS, WARPS = 8, 2  # of a program of more rows
TILE_ROWS, TILE_WARPS = 32, 4


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
) -> torch.Tensor:
    """Returns the turned queries [T, nq, d] and stores the rows' keys and values.

    parts: [S, T, (nq + 2 nkv) d], in float32 or in the cache's dtype. cos, sin: float32 [positions, d / 2].
    positions, sequences: int32 [T]. page_tables: int32 [sequences, P]. q_norm, k_norm: [d], both or neither.
    """
    parts = parts.contiguous()
    num_parts, rows, outputs = parts.shape
    _, kv_heads, width, _ = cache.keys.shape
    if outputs != (num_heads + 2 * kv_heads) * width:
        raise ValueError(f"qkv: expected {(num_heads + 2 * kv_heads) * width} outputs, found {outputs}")
    q = torch.empty(rows, num_heads, width, dtype=cache.keys.dtype, device=parts.device)
    tensors = (parts, bias, cos, sin, q_norm, k_norm, positions, sequences, page_tables, q, cache.keys, cache.values)
    numbers = eps, rows, page_tables.stride(0)
    sizes = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": kv_heads,
        "HALF": width // 2,
        "PAGE": PAGE_SIZE,
        "NUM_PARTS": num_parts,
        "BLOCK": triton.next_power_of_2(width // 2),
    }
    if rows > MOST_ROWS_ALONE:
        grid = (kv_heads * triton.cdiv(rows, TILE_ROWS),)
        _rope_and_write_tile[grid](*tensors, *numbers, **sizes, ROWS=TILE_ROWS, num_warps=TILE_WARPS, **LAUNCH)
    elif rows:
        heads, warps = (1, 1) if rows <= FEW_ROWS or q_norm is not None else (HEADS, WARPS)
        own = rows, triton.cdiv(num_heads + 2 * kv_heads, heads)
        _rope_and_write[own](*tensors, *numbers, **sizes, HEADS=heads, num_warps=warps, **LAUNCH)
    return q


@triton.jit
def _turned(first, second, c, s, norm, pair, inside, eps, HALF: tl.constexpr):
    """The two halves of heads, [ROWS, BLOCK], normalised where there is a norm, and turned."""
    dtype = first.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    if norm is not None:
        squares = tl.sum(x * x, 1, keep_dims=True) + tl.sum(y * y, 1, keep_dims=True)
        scale = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
        x = x * scale * tl.load(norm + pair, mask=inside, other=0.0).to(tl.float32)
        y = y * scale * tl.load(norm + HALF + pair, mask=inside, other=0.0).to(tl.float32)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    return (x * c - y * s).to(dtype), (y * c + x * s).to(dtype)


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
    eps,
    rows,
    table_width,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    row = tl.program_id(0)
    head, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    in_half, inside = pair < HALF, (head < ALL_HEADS) & (pair < HALF)
    column = head * 2 * HALF + pair
    dtype = keys.dtype.element_ty

    # Loads that depend on each other come before the wait.
    position, sequence = tl.load(positions + row), tl.load(sequences + row).to(tl.int64)
    first_bias, second_bias = bias_of(bias, column, inside), bias_of(bias, column + HALF, inside)
    angle = position.to(tl.int64) * HALF + pair
    c = tl.load(cos + angle, mask=in_half, other=0.0)
    s = tl.load(sin + angle, mask=in_half, other=0.0)
    page = tl.load(page_tables + sequence * table_width + position // PAGE).to(tl.int64)
    is_q, is_key = head < NUM_HEADS, (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    after_previous()

    width = ALL_HEADS * 2 * HALF
    first = (sum_parts_of_row(parts, row, rows, width, column, inside, NUM_PARTS) + first_bias).to(dtype)
    second = (sum_parts_of_row(parts, row, rows, width, column + HALF, inside, NUM_PARTS) + second_bias).to(dtype)
    norm = q_norm
    if q_norm is not None:  # and there is one head
        norm = q_norm if tl.program_id(1) < NUM_HEADS else k_norm
    turned = _turned(first, second, c, s, norm, pair, in_half, eps, HALF)
    place = q + (row.to(tl.int64) * NUM_HEADS + head) * 2 * HALF + pair
    tl.store(place, turned[0], mask=is_q & inside)
    tl.store(place + HALF, turned[1], mask=is_q & inside)
    block, offset = page * NUM_KV_HEADS + (head - NUM_HEADS), position % PAGE
    place = keys + (block * 2 * HALF + pair) * PAGE + offset
    tl.store(place, turned[0], mask=is_key & inside)
    tl.store(place + HALF * PAGE, turned[1], mask=is_key & inside)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    place = values + ((block - NUM_KV_HEADS) * PAGE + offset) * 2 * HALF + pair
    tl.store(place, first, mask=is_value & inside)
    tl.store(place + HALF, second, mask=is_value & inside)


@triton.jit
def _head_of_rows(
    parts,
    bias,
    row,
    rows,
    head,
    pair,
    inside,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    dtype: tl.constexpr,
):
    """The two halves of one head of a tile's rows, [ROWS, BLOCK], summed up and rounded."""
    column, in_head = head * 2 * HALF + pair, pair < HALF
    first = sum_parts_of_row(parts, row[:, None], rows, WIDTH, column, inside, NUM_PARTS)
    second = sum_parts_of_row(parts, row[:, None], rows, WIDTH, column + HALF, inside, NUM_PARTS)
    first, second = first + bias_of(bias, column, in_head), second + bias_of(bias, column + HALF, in_head)
    return first.to(dtype), second.to(dtype)


@triton.jit(do_not_specialize=["rows", "table_width"])
def _rope_and_write_tile(
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
    eps,
    rows,
    table_width,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    SHARING: tl.constexpr = NUM_HEADS // NUM_KV_HEADS  # heads to a key head
    WIDTH: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row = tl.program_id(0) // NUM_KV_HEADS * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, BLOCK)[None, :]
    exists, in_head = row < rows, pair < HALF
    inside = exists[:, None] & in_head
    dtype = keys.dtype.element_ty

    # Loads that depend on each other come before the wait.
    position = tl.load(positions + row, mask=exists, other=0)
    sequence = tl.load(sequences + row, mask=exists, other=0).to(tl.int64)
    angle = position.to(tl.int64)[:, None] * HALF + pair
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    page = tl.load(page_tables + sequence * table_width + position // PAGE, mask=exists, other=0).to(tl.int64)
    block, offset = page * NUM_KV_HEADS + kv_head, position % PAGE
    after_previous()

    for head in range(kv_head * SHARING, (kv_head + 1) * SHARING):
        first, second = _head_of_rows(parts, bias, row, rows, head, pair, inside, WIDTH, HALF, NUM_PARTS, dtype)
        first, second = _turned(first, second, c, s, q_norm, pair, in_head, eps, HALF)
        place = q + (row.to(tl.int64)[:, None] * NUM_HEADS + head) * 2 * HALF + pair
        tl.store(place, first, mask=inside)
        tl.store(place + HALF, second, mask=inside)

    head = NUM_HEADS + kv_head
    first, second = _head_of_rows(parts, bias, row, rows, head, pair, inside, WIDTH, HALF, NUM_PARTS, dtype)
    first, second = _turned(first, second, c, s, k_norm, pair, in_head, eps, HALF)
    # Nothing is known of these places, so that the compiler gives a warp's threads the first dimension: 32 positions.
    place = keys + (block[:, None] * 2 * HALF + pair) * PAGE + offset[:, None]
    tl.store(place, first, mask=inside)
    tl.store(place + HALF * PAGE, second, mask=inside)

    head += NUM_KV_HEADS
    first, second = _head_of_rows(parts, bias, row, rows, head, pair, inside, WIDTH, HALF, NUM_PARTS, dtype)
    place = values + (block * PAGE + offset)[:, None] * 2 * HALF + pair
    tl.store(place, first, mask=inside)
    tl.store(place + HALF, second, mask=inside)
