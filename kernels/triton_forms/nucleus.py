"""Where top-k and top-p cut a row off: the border is narrowed down, some bits in each pass over the row.

A token stays when its logit is above the border, or equals it and the token is at most the border's. The first pass
puts every token into a bin, finer the nearer its logit is to the largest, and counts the bins' tokens and adds up their
masses. From then on only tokens of one bin count: that with the k-th largest logit, and later that in which the mass
above reaches p. It is cut into bins by the bits of the logits, until all that are left are equal. Masses are whole
numbers, so that their sums are exact in whatever order programs add to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from kernels.triton_forms.order import float_of, ordered
from kernels.triton_forms.overlap import LAUNCH, after_previous

if TYPE_CHECKING:
    from kernels.row_params import RowParams

BLOCK, WARPS = 1024, 4
_BITS = 11  # of a bin's number; a logit's 32 bits are three of them
_STEPS = 3
_MASS_BITS = 62  # of a row's mass, at most


def find_borders(logits: torch.Tensor, largest: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the borders' logits, float32 [R], and tokens, int32 [R], of logits [R, V] with these largest, [R].

    Those of greedy rows, and of rows whose largest logit is -inf or not a number, are anything.
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    wide: dict[str, Any] = {"dtype": torch.int64, "device": logits.device}
    masses = torch.empty(rows, vocabulary, **wide)
    sums = torch.zeros(1 + 2 * _STEPS, rows, 2, 2**_BITS, **wide)
    found = torch.empty(2 * _STEPS, rows, 4, **wide)
    equal = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    borders = torch.empty(rows, dtype=torch.float32, device=logits.device)
    staying, tokens = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    row_params = largest, params.temperature, params.top_k, params.top_p
    unit, grid = 2.0 ** (_MASS_BITS - vocabulary.bit_length()), (blocks, rows)
    options: dict[str, Any] = {
        "UNIT": unit,
        "BITS": _BITS,
        "STEPS": _STEPS,
        "BLOCK": BLOCK,
        "num_warps": WARPS,
    } | LAUNCH
    _count_all[grid](logits, *row_params, masses, sums, vocabulary, **options)
    for by_mass in (False, True):
        for step in range(_STEPS):
            _count_bin[grid](
                logits, *row_params, masses, sums, found, rows, vocabulary, step, BY_MASS=by_mass, **options
            )
    _count_equal[grid](logits, *row_params, sums, found, borders, staying, equal, rows, vocabulary, blocks, **options)
    _find_token[(rows,)](
        logits,
        borders,
        staying,
        equal,
        tokens,
        vocabulary,
        blocks,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        **LAUNCH,
    )
    return borders, tokens


@triton.jit
def _params_of(largest, temperature, top_k, top_p, row, vocabulary):
    """(largest logit, temperature, k, p) of a row, k 0 and p 1 where they filter nothing, or nothing is to be found.

    Waits for the kernel before.
    """
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row).to(tl.float64)
    after_previous()
    top = tl.load(largest + row)
    chooses = (heat != 0) & (top > float("-inf"))  # false for NaN, too
    k = tl.where(chooses & (k < vocabulary), k, 0)
    p = tl.where(chooses & (p < 1), p, 1.0)
    return tl.minimum(top, 3.4028234663852886e38), tl.maximum(heat, 1.1754943508222875e-38), k, p


@triton.jit
def _distance(value, top, heat):
    """How far a logit is below the largest, / temperature."""
    return (top - tl.minimum(value, 3.4028234663852886e38)) / heat


@triton.jit
def _mass_of(value, top, heat, UNIT: tl.constexpr):
    """exp(value / temperature) as a whole number, the largest logit's being UNIT."""
    return (tl.exp(-_distance(value, top, heat).to(tl.float64)) * UNIT + 0.5).to(tl.int64)


@triton.jit
def _first_bin(value, top, heat, BITS: tl.constexpr):
    """The bin by distance, the largest logit's being the last: 128 bins for each doubling of 1 + distance."""
    octaves = ((1.0 + _distance(value, top, heat)).to(tl.int32, bitcast=True) - 0x3F800000) >> 16
    return tl.maximum(2**BITS - 1 - octaves, 0)


@triton.jit
def _interval(sums, found, row, rows, step, k, needed, BY_MASS: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr):
    """Where the border is after the first pass and `step` more: a bin of the first pass, the lowest number in it, as
    `ordered`, that the border can have, how many logits are above (for top-k only), and their mass.
    """
    first, low = row.to(tl.int64) * 0, row.to(tl.int64) * 0 - 2147483648
    count, mass = row.to(tl.int64) * 0, row.to(tl.int64) * 0
    slot, phase = row * 0, STEPS if BY_MASS else 0
    if step > 0:
        slot = phase + step
        state = found + ((slot - 1) * rows + row) * 4
        first, low, count, mass = tl.load(state), tl.load(state + 1), tl.load(state + 2), tl.load(state + 3)
    each = tl.arange(0, 2**BITS)
    place = sums + (slot * rows + row).to(tl.int64) * 2 * 2**BITS + each
    masses = tl.load(place + 2**BITS)
    if BY_MASS:
        above = mass + tl.sum(masses, 0) - tl.cumsum(masses, 0)
        reaches = (above.to(tl.float64) < needed) | (above == 0)
    else:
        counts = tl.load(place)
        above = count + tl.sum(counts, 0) - tl.cumsum(counts, 0)
        reaches = above < k
    chosen = tl.min(tl.where(reaches, each, 2**BITS - 1), 0)
    if not BY_MASS:
        count = tl.sum(tl.where(each == chosen, above, 0), 0)
    mass += tl.sum(tl.where(each > chosen, masses, 0), 0)
    if step > 0:
        low += chosen.to(tl.int64) << (BITS * (STEPS - step))
    else:
        first = chosen.to(tl.int64)
    return first, low, count, mass


@triton.jit
def _limit(
    sums, found, row, rows, k, top, heat, vocabulary, UNIT: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr
):
    """top-k's border, how many of the logits that equal it stay, and the mass of what stays."""
    if k > 0:
        _first, border, count, mass = _interval(sums, found, row, rows, STEPS, k, 0.0, False, BITS, STEPS)
        num_equal = k - count
        total = mass + num_equal * _mass_of(float_of(border.to(tl.int32)), top, heat, UNIT)
    else:
        border, num_equal = row.to(tl.int64) * 0 - 2139095041, row.to(tl.int64) * 0 + vocabulary  # -inf
        total = tl.sum(tl.load(sums + row.to(tl.int64) * 2 * 2**BITS + 2**BITS + tl.arange(0, 2**BITS)), 0)
    return border, num_equal, total


@triton.jit
def _add_to_bins(sums, slot, rows, row, bin, mass, inside, k, BITS: tl.constexpr):
    """Counts are added up only for top-k, and no mass where there is none."""
    place = sums + (slot * rows + row).to(tl.int64) * 2 * 2**BITS + bin
    tl.atomic_add(place, (bin * 0 + 1).to(tl.int64), mask=inside & (k > 0), sem="relaxed")
    tl.atomic_add(place + 2**BITS, mass, mask=inside & (mass > 0), sem="relaxed")


@triton.jit
def _count_all(
    logits,
    largest,
    temperature,
    top_k,
    top_p,
    masses,
    sums,
    vocabulary,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1)
    top, heat, k, p = _params_of(largest, temperature, top_k, top_p, row, vocabulary)
    if (k == 0) & (p == 1):
        return
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, place = token < vocabulary, row.to(tl.int64) * vocabulary + token
    value = tl.load(logits + place, mask=inside, other=0.0)
    mass = _mass_of(value, top, heat, UNIT)
    tl.store(masses + place, mass, mask=inside)
    _add_to_bins(sums, 0, 0, row, _first_bin(value, top, heat, BITS), mass, inside, k, BITS)


@triton.jit(do_not_specialize=["rows", "step"])
def _count_bin(
    logits,
    largest,
    temperature,
    top_k,
    top_p,
    masses,
    sums,
    found,
    rows,
    vocabulary,
    step,
    BY_MASS: tl.constexpr,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cuts the bin that `step` passes after the first have left into bins."""
    row = tl.program_id(1)
    top, heat, k, p = _params_of(largest, temperature, top_k, top_p, row, vocabulary)
    wanted = p < 1 if BY_MASS else k > 0
    if not wanted:
        return
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, place = token < vocabulary, row.to(tl.int64) * vocabulary + token
    value = tl.load(logits + place, mask=inside, other=0.0)
    needed = p
    if BY_MASS:
        _border, _num_equal, total = _limit(sums, found, row, rows, k, top, heat, vocabulary, UNIT, BITS, STEPS)
        needed = p * total.to(tl.float64)
    first, low, count, mass = _interval(sums, found, row, rows, step, k, needed, BY_MASS, BITS, STEPS)
    slot = (STEPS if BY_MASS else 0) + step
    if tl.program_id(0) == 0:
        state = found + (slot * rows + row) * 4
        tl.store(state, first)
        tl.store(state + 1, low)
        tl.store(state + 2, count)
        tl.store(state + 3, mass)
    bin = (ordered(value).to(tl.int64) - low) >> (BITS * (STEPS - 1 - step))
    inside = inside & (_first_bin(value, top, heat, BITS) == first) & (bin >= 0) & (bin < 2**BITS)
    own = tl.load(masses + place, mask=inside, other=0)
    _add_to_bins(sums, slot + 1, rows, row, bin.to(tl.int32), own, inside, k, BITS)


@triton.jit(do_not_specialize=["rows"])
def _count_equal(
    logits,
    largest,
    temperature,
    top_k,
    top_p,
    sums,
    found,
    borders,
    staying,
    equal,
    rows,
    vocabulary,
    blocks,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The border, how many of the logits that equal it stay, and how many of a block do equal it."""
    block, row = tl.program_id(0), tl.program_id(1)
    top, heat, k, p = _params_of(largest, temperature, top_k, top_p, row, vocabulary)
    border, num_equal, total = _limit(sums, found, row, rows, k, top, heat, vocabulary, UNIT, BITS, STEPS)
    if p < 1:
        needed = p * total.to(tl.float64)
        _first, low, _count, mass = _interval(sums, found, row, rows, STEPS, k, needed, True, BITS, STEPS)
        each = tl.maximum(_mass_of(float_of(low.to(tl.int32)), top, heat, UNIT), 1).to(tl.float64)
        fitting = tl.maximum(tl.ceil((needed - mass.to(tl.float64)) / each), 1.0)
        fitting = tl.minimum(fitting, 2147483647.0).to(tl.int64)
        num_equal = tl.where(low == border, tl.minimum(num_equal, fitting), fitting)
        border = low
    if block == 0:
        tl.store(borders + row, float_of(border.to(tl.int32)))
        tl.store(staying + row, num_equal.to(tl.int32))
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=0.0)
    same = (ordered(value) == border.to(tl.int32)) & (token < vocabulary)
    tl.store(equal + row * blocks + block, tl.sum(same.to(tl.int32), 0))


@triton.jit
def _find_token(logits, borders, staying, equal, tokens, vocabulary, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The last of the tokens that equal the border and stay; beyond all where all of them do."""
    row = tl.program_id(0)
    after_previous()
    border, num_equal = ordered(tl.load(borders + row)), tl.load(staying + row)
    each = tl.arange(0, BLOCKS)
    counts = tl.load(equal + row * blocks + each, mask=each < blocks, other=0)
    block = tl.sum(((tl.cumsum(counts, 0) < num_equal) & (each < blocks)).to(tl.int32), 0)
    before = tl.sum(tl.where(each < block, counts, 0), 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=0.0)
    same = (ordered(value) == border) & (token < vocabulary)
    stays = same & (before + tl.cumsum(same.to(tl.int32), 0) <= num_equal)
    tl.store(tokens + row, tl.where(block < blocks, tl.max(tl.where(stays, token, -1), 0), vocabulary))
