"""What the attention kernels share: a running softmax, in base 2, and where tiles of rows and blocks of keys stand."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
FEW_ROWS = 8  # of one chain, as a rule; more are several chains
SHARING = 4  # rows, at most, whose tiles one program takes, one after the other
_LOOKBACK = tl.constexpr(64)  # the longest chain whose tiles do not overlap; padding lengthens the last one


def rows_of_program(rows: int, programs: int, least: int) -> int:
    """So many rows share their programs, of which a row alone would have `programs`: `least` at least are left.

    Most rows of a chain are in the tile of another one, and their programs would find nothing to do.
    """
    shared = min(SHARING, triton.next_power_of_2(rows))
    while shared > 1 and triton.cdiv(rows, shared) * programs < least:
        shared //= 2
    return shared


def launch_options(warps: int, stages: int, registers: int, vector_bytes: int) -> dict[str, int]:
    """The options of a launch, which are made for vectors of 64 bf16 numbers; longer ones need more of everything.

    registers: of a thread, at most, so that as many programs as were thought of fit a multiprocessor.
    """
    stages = min(stages, 3 if vector_bytes <= 256 else 2) if vector_bytes > 128 else stages
    return {"num_warps": warps, "num_stages": stages, "maxnreg": registers if vector_bytes <= 128 else 255}


@triton.jit
def leading_rows(sequences, begin, end, SHARING: tl.constexpr, TILE_ROWS: tl.constexpr):
    """(rows from `begin` [SHARING], which of them, before `end`, lead a tile: every TILE_ROWS-th of its chain)."""
    place = begin + tl.arange(0, SHARING)
    before = place[:, None] - 1 - tl.arange(0, _LOOKBACK)[None, :]
    sequence = tl.load(sequences + place, mask=place < end, other=-1)
    earlier = tl.load(sequences + before, mask=(before >= 0) & (before < end), other=-1) == sequence[:, None]
    return place, (place < end) & (tl.sum(earlier.to(tl.int32), 1) % TILE_ROWS == 0)


@triton.jit
def rows_of_tile(sequences, positions, row, rows, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """(sequence, rows [TILE], heads of the group [TILE], which there are [TILE], positions [TILE], else -1)."""
    member = tl.arange(0, TILE)
    tile_row, in_group = row + member // GROUP_BLOCK, member % GROUP_BLOCK
    sequence = tl.load(sequences + row)
    inside = (tile_row < rows) & (in_group < GROUP)
    own = tl.load(positions + tile_row, mask=inside, other=-1)
    inside &= tl.load(sequences + tile_row, mask=inside, other=-1) == sequence
    return sequence, tile_row, in_group, inside, tl.where(inside, own, -1)


@triton.jit
def begin_softmax(sinks, heads, inside):
    """Returns (largest, total), [M], before any key: nothing, or the sink of each head, a logit without a value."""
    largest = tl.where(inside, float("-inf"), 0.0)
    total = tl.where(inside, 0.0, 1.0)
    if sinks is not None:
        largest = tl.load(sinks + heads, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.zeros_like(largest) + 1.0
    return largest, total


@triton.jit
def take_block_in(q, k, v, visible, scale, largest, total, acc, PRECISION: tl.constexpr):
    """Returns (largest, total, acc) of the rows q[M, D] with the keys k[D, N] and values v[N, D] taken in.

    visible: [M, N], or None where every row sees every key; a row that sees none of them keeps its bits. scale: more
    than zero, log2(e) included. Values that no row sees must be finite.
    """
    logits = tl.dot(q, k, input_precision=PRECISION)
    if visible is not None:
        logits = tl.where(visible, logits, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(logits, 1) * scale)
    reference = new_largest
    if visible is not None:
        # A row that has seen no key yet: any finite number keeps -inf from being subtracted from itself.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(logits * scale - reference[:, None])
    kept = tl.exp2(largest - reference)
    total = total * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_largest, total, acc


@triton.jit
def take_few_in(q, k, v, visible, scale, largest, totals, acc, PRECISION: tl.constexpr):
    """As `take_block_in`, transposed: few rows q[D, M] stand in columns, and so do visible [N, M] and acc [D, M].

    So the matrix units read keys and values where they were put. totals [N, M] is still to be summed over N.
    """
    logits = tl.where(visible, tl.dot(tl.trans(k), q, input_precision=PRECISION), float("-inf"))
    new_largest = tl.maximum(largest, tl.max(logits, 0) * scale)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(logits * scale - reference[None, :])
    kept = tl.exp2(largest - reference)
    totals = totals * kept[None, :] + weights
    acc = acc * kept[None, :] + tl.dot(tl.trans(v), weights.to(v.dtype), input_precision=PRECISION)
    return new_largest, totals, acc


@triton.jit
def take_split_in(largest, total, acc, part_largest, part_total, part):
    """(largest, total, acc) with those of a split taken in, which may have seen nothing.

    acc and part: sums of values, [D, M], or [D]; the others are [1, M], or scalars. Which products are fused is said,
    so that every kernel gives the same bits.
    """
    new_largest = tl.maximum(largest, part_largest)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    kept, weight = tl.exp2(largest - reference), tl.exp2(part_largest - reference)
    total = tl.fma(part_total, weight, total * kept)
    return new_largest, total, tl.fma(part, tl.broadcast_to(weight, part.shape), acc * kept)


@triton.jit
def block_places(
    keys,
    values,
    pages,
    kv_head,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Where one head's keys [D, KEYS] and values [KEYS, D] of a few pages stand; dimensions up to BLOCK."""
    dims, slots = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    page = tl.zeros((KEYS,), tl.int32)
    for index in tl.static_range(KEYS // PAGE):
        page = tl.where(slots // PAGE == index, pages[index], page)
    block = (page.to(tl.int64) * KV_HEADS + kv_head) * WIDTH * PAGE
    offsets = slots % PAGE
    k_places = keys + block[None, :] + dims[:, None] * PAGE + offsets[None, :]
    return k_places, values + block[:, None] + offsets[:, None] * WIDTH + dims[None, :]


@triton.jit
def pages_of(table, first, last, PAGES: tl.constexpr):
    """The pages of a block of keys, from column `first` of the sequence's table, none behind column `last`."""
    pages = (tl.load(table + tl.minimum(first, last)),)
    for index in tl.static_range(1, PAGES):
        pages += (tl.load(table + tl.minimum(first + index, last)),)  # type: ignore[assignment]
    return pages
