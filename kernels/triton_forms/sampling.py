"""The choice of tokens: the largest logit, or the largest sum of filtered logit and noise, the lowest token on a tie.

Three passes over blocks of the vocabulary, none of which waits for the host: the largest logit of each block; what a
sampling row's tokens become with temperature, filters and noise; the best of the blocks. Between the first two, for
rows with top-k or top-p, more passes find the border of what stays (`nucleus.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.row_params import RowParams
from kernels.triton_forms.noise import gumbel_noise
from kernels.triton_forms.nucleus import find_borders
from kernels.triton_forms.overlap import LAUNCH, after_previous

_BLOCK = 1024


def choose(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Returns each row's token, int64 [R], for float32 logits [R, V]; -1 where all are -inf or one is NaN."""
    rows, vocabulary = logits.shape
    logits = logits.contiguous()
    blocks = triton.cdiv(vocabulary, _BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    at = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    largest_of_block[(blocks, rows)](logits, best, at, vocabulary, blocks, BLOCK=_BLOCK, **LAUNCH)
    every_block = triton.next_power_of_2(blocks)
    if not params.all_greedy:
        borders, border_tokens = find_borders(logits, best.amax(-1), params) if params.filters else (None, None)
        noisy, noisy_at = torch.empty_like(best), torch.empty_like(at)
        _noisiest_of_block[(blocks, rows)](
            logits,
            best,
            at,
            borders,
            border_tokens,
            params.temperature,
            params.log_min_p,
            params.seed,
            params.position,
            noisy,
            noisy_at,
            vocabulary,
            blocks,
            BLOCK=_BLOCK,
            BLOCKS=every_block,
            **LAUNCH,
        )
        best, at = noisy, noisy_at
    _best_block[(rows,)](best, at, tokens, blocks, BLOCKS=every_block, **LAUNCH)
    return tokens


@triton.jit
def scaled_logits(logits, largest, temperature):
    """Logits / temperature, less their largest: at most 0."""
    top = tl.minimum(largest, 3.4028234663852886e38)
    return (tl.minimum(logits, 3.4028234663852886e38) - top) / tl.maximum(temperature, 1.1754943508222875e-38)


@triton.jit
def _lowest_of_largest(values, tokens):
    """The largest value, and the lowest of the tokens that have it; NaN where there is one."""
    not_a_number = tl.max((values != values).to(tl.int32), 0)
    largest = tl.max(values, 0)
    token = tl.min(tl.where(values == largest, tokens, 2147483647), 0)
    return tl.where(not_a_number > 0, float("nan"), largest), token


@triton.jit
def largest_of_block(logits, best, at, vocabulary, blocks, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    after_previous()
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    largest, first = _lowest_of_largest(value, token)
    tl.store(best + row * blocks + block, largest)
    tl.store(at + row * blocks + block, first)


@triton.jit
def _noisiest_of_block(
    logits,
    best,
    at,
    borders,
    border_tokens,
    temperature,
    log_min_p,
    seed,
    position,
    noisy,
    noisy_at,
    vocabulary,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1)
    place, each = row * blocks + block, tl.arange(0, BLOCKS)
    heat = tl.load(temperature + row)
    noise = tl.zeros((BLOCK,), tl.float32)
    if heat != 0:
        noise = gumbel_noise(tl.load(seed + row), tl.load(position + row), block * BLOCK, BLOCK)
    after_previous()
    top, _ = _lowest_of_largest(tl.load(best + row * blocks + each, mask=each < blocks, other=float("-inf")), each)
    # Greedy rows, and those without a choice, keep what the first pass found.
    if (heat == 0) | (top != top) | (top == float("-inf")):
        tl.store(noisy + place, tl.where(top != top, top, tl.load(best + place)))
        tl.store(noisy_at + place, tl.load(at + place))
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    scaled = scaled_logits(value, top, heat)
    stays = (scaled >= tl.load(log_min_p + row)) & (token < vocabulary)
    if borders is not None:
        border = tl.load(borders + row)
        stays = stays & ((value > border) | ((value == border) & (token <= tl.load(border_tokens + row))))
    largest_sum, first = _lowest_of_largest(tl.where(stays, scaled + noise, float("-inf")), token)
    tl.store(noisy + place, largest_sum)
    tl.store(noisy_at + place, first)


@triton.jit
def _best_block(best, at, tokens, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    after_previous()
    value = tl.load(best + row * blocks + block, mask=block < blocks, other=float("-inf"))
    token = tl.load(at + row * blocks + block, mask=block < blocks, other=2147483647)
    largest, first = _lowest_of_largest(value, token)
    tl.store(tokens + row, tl.where(largest > float("-inf"), first, -1).to(tl.int64))
