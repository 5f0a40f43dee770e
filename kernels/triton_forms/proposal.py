"""A draft's choice of tokens: the largest sum of scaled logit and noise, and its probability, without filters.

Three passes over blocks of the draft's vocabulary: the largest logit of each; the best of each with noise, and the mass
of each; the best of the blocks. Nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_forms.noise import gumbel_noise_of
from kernels.triton_forms.overlap import LAUNCH, after_previous
from kernels.triton_forms.sampling import largest_of_block

_BLOCK = 256  # a draft's 32,000 tokens, two logarithms each: one for each multiprocessor


def propose(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    noisy: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton form of `draft_service.choice.Chooser.choose_rows`.

    logits: float32 [R, V]. target_ids: int64 [V]. temperature: float32 [R]. seed: int64 [R]. noisy, positions: int32
    [R]. Returns the chosen tokens' ids of the target, int64 [R], and their probabilities, float32 [R].
    """
    rows, vocabulary = logits.shape
    logits = logits.contiguous()
    blocks = triton.cdiv(vocabulary, _BLOCK)
    largest, score, mass, scaled = (torch.empty(4, rows, blocks, dtype=torch.float32, device=logits.device)).unbind()
    at = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    probabilities = torch.empty(rows, dtype=torch.float32, device=logits.device)
    grid, every_block = (blocks, rows), triton.next_power_of_2(blocks)
    largest_of_block[grid](logits, largest, at, vocabulary, blocks, BLOCK=_BLOCK, **LAUNCH)
    _best_of_block[grid](
        logits,
        largest,
        target_ids,
        temperature,
        seed,
        noisy,
        positions,
        score,
        mass,
        scaled,
        at,
        vocabulary,
        blocks,
        BLOCK=_BLOCK,
        BLOCKS=every_block,
        **LAUNCH,
    )
    parts = score, mass, scaled, at
    _best_of_row[(rows,)](*parts, target_ids, tokens, probabilities, blocks, BLOCKS=every_block, **LAUNCH)
    return tokens, probabilities


@triton.jit
def _best_of_block(
    logits,
    largest,
    target_ids,
    temperature,
    seed,
    noisy,
    positions,
    score,
    mass,
    scaled_best,
    at,
    vocabulary,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1)
    each = tl.arange(0, BLOCKS)
    heat = tl.load(temperature + row)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    noise = tl.zeros((BLOCK,), tl.float32)
    if tl.load(noisy + row) != 0:
        ids = tl.load(target_ids + token, mask=inside, other=0).to(tl.int32)
        noise = gumbel_noise_of(tl.load(seed + row), tl.load(positions + row) + 2, ids)
    after_previous()
    top = tl.max(tl.load(largest + row * blocks + each, mask=each < blocks, other=float("-inf")), 0)
    value = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=inside, other=float("-inf"))
    scaled = (value - top) / tl.where(heat > 0, tl.maximum(heat, 1.1754943508222875e-38), 1.0)
    sums = scaled + noise
    best = tl.max(sums, 0)
    first = tl.min(tl.where(sums == best, token, 2147483647), 0)
    place = row * blocks + block
    tl.store(score + place, best)
    tl.store(mass + place, tl.sum(tl.where(inside, tl.exp(scaled), 0.0), 0))
    tl.store(scaled_best + place, tl.max(tl.where(token == first, scaled, float("-inf")), 0))
    tl.store(at + place, first)


@triton.jit
def _best_of_row(score, mass, scaled_best, at, target_ids, tokens, probabilities, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    inside, place = block < blocks, row * blocks + block
    after_previous()
    value = tl.load(score + place, mask=inside, other=float("-inf"))
    token = tl.load(at + place, mask=inside, other=2147483647)
    first = tl.min(tl.where(value == tl.max(value, 0), token, 2147483647), 0)
    scaled = tl.max(tl.where(inside & (token == first), tl.load(scaled_best + place, mask=inside, other=0.0), -1e38), 0)
    total = tl.sum(tl.load(mass + place, mask=inside, other=0.0), 0)
    # A row that is not a number has no best one; what is proposed for it has to be a token all the same.
    known = first < 2147483647
    tl.store(tokens + row, tl.load(target_ids + tl.where(known, first, 0)))
    tl.store(probabilities + row, tl.where(known, tl.exp(scaled) / total, 0.0))
