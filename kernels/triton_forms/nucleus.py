"""Where top-k and top-p cut a row off: a program a row, which halves the range of the border bit by bit.

A token stays when its logit is above the border, or equals it and the token is at most the border's. Masses are
computed once, a program a block, and summed in double precision in one order; where the sum meets p within rounding,
another sum than the PyTorch form's decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.row_params import RowParams

_BLOCK = 8192
_MASS_BLOCK = 2048


def find_borders(logits: torch.Tensor, largest: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the borders' logits, float32 [R], and tokens, int32 [R], of logits [R, V] with these largest, [R]."""
    rows, vocabulary = logits.shape
    borders = torch.empty(rows, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    masses = torch.empty_like(logits)
    grid = triton.cdiv(vocabulary, _MASS_BLOCK), rows
    _masses[grid](logits, largest, params.temperature, masses, vocabulary, BLOCK=_MASS_BLOCK)
    _find_border[(rows,)](
        logits,
        masses,
        largest,
        params.temperature,
        params.top_k,
        params.top_p,
        borders,
        tokens,
        vocabulary,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=16,
    )
    return borders, tokens


@triton.jit
def _ordered(values):
    """Whole numbers in the order of the floats; -0 like 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _float_of(ordered):
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _mass_of(value, top, heat):
    """exp(value / temperature), the largest logit's being 1."""
    return tl.exp(((value - top) / heat).to(tl.float64)).to(tl.float32)


@triton.jit
def _masses(logits, largest, temperature, masses, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, place = token < vocabulary, row.to(tl.int64) * vocabulary + token
    top, heat = _top_and_heat(largest, temperature, row)
    tl.store(masses + place, _mass_of(tl.load(logits + place, mask=inside, other=0.0), top, heat), mask=inside)


@triton.jit
def _top_and_heat(largest, temperature, row):
    top = tl.minimum(tl.load(largest + row), 3.4028234663852886e38)
    return top, tl.maximum(tl.load(temperature + row), 1.1754943508222875e-38)


@triton.jit
def _above(row_logits, row_masses, border, vocabulary, BLOCK: tl.constexpr):
    """How many logits are above the border, a whole number as `_ordered`, and their mass."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, vocabulary, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = tl.load(row_logits + token, mask=token < vocabulary, other=float("-inf"))
        above = (_ordered(value) > border) & (token < vocabulary)
        count += above.to(tl.int32)
        mass += tl.load(row_masses + token, mask=above, other=0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _find_border(
    logits, masses, largest, temperature, top_k, top_p, borders, border_tokens, vocabulary, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    top, heat = _top_and_heat(largest, temperature, row)
    k, p = tl.load(top_k + row), tl.load(top_p + row).to(tl.float64)
    row_logits, row_masses = logits + row.to(tl.int64) * vocabulary, masses + row.to(tl.int64) * vocabulary
    zero = row.to(tl.int64) * 0
    least, most = zero - 2139095041, zero + 2139095040  # -inf and inf, as `_ordered`

    # top-k: the lowest border with fewer than k logits above it is the k-th largest logit.
    k_border, num_equal = least, row * 0 + vocabulary
    _count, total = _above(row_logits, row_masses, least.to(tl.int32), vocabulary, BLOCK)
    if (k > 0) & (k < vocabulary):
        k_low, k_high = least, most
        for _ in range(32):
            middle = (k_low + k_high) >> 1
            count, _mass = _above(row_logits, row_masses, middle.to(tl.int32), vocabulary, BLOCK)
            k_high = tl.where(count < k, middle, k_high)
            k_low = tl.where(count < k, k_low, middle + 1)
        k_border = k_high
        count, mass = _above(row_logits, row_masses, k_border.to(tl.int32), vocabulary, BLOCK)
        num_equal = k - count
        total = mass + num_equal * _mass_of(_float_of(k_border.to(tl.int32)), top, heat).to(tl.float64)

    # top-p: the lowest border above which less than p of the mass lies; above the largest lies none.
    border = k_border
    if p < 1:
        p_low, p_high = k_border, most
        for _ in range(32):
            middle = (p_low + p_high) >> 1
            _count, mass = _above(row_logits, row_masses, middle.to(tl.int32), vocabulary, BLOCK)
            reaches = (mass < p * total) | (mass == 0)
            p_high = tl.where(reaches, middle, p_high)
            p_low = tl.where(reaches, p_low, middle + 1)
        border = p_high
        _count, mass = _above(row_logits, row_masses, border.to(tl.int32), vocabulary, BLOCK)
        each = _mass_of(_float_of(border.to(tl.int32)), top, heat).to(tl.float64)
        fitting = tl.maximum(tl.ceil((p * total - mass) / each), 1.0)
        fitting = tl.minimum(fitting, 2147483647.0).to(tl.int32)
        num_equal = tl.where(border == k_border, tl.minimum(num_equal, fitting), fitting)

    # Of those that equal the border the lowest `num_equal` tokens stay.
    seen, last = row * 0, row * 0 - 1
    for begin in range(0, vocabulary, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = tl.load(row_logits + token, mask=token < vocabulary, other=float("-inf"))
        equal = ((_ordered(value) == border.to(tl.int32)) & (token < vocabulary)).to(tl.int32)
        stays = (equal > 0) & (seen + tl.cumsum(equal, 0) <= num_equal)
        last = tl.maximum(last, tl.max(tl.where(stays, token, -1), 0))
        seen += tl.sum(equal, 0)
    tl.store(borders + row, _float_of(border.to(tl.int32)))
    tl.store(border_tokens + row, last)
