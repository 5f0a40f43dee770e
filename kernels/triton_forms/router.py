"""The router's choice: a program a row adds up its logits in float32, and takes the largest, one after the other.

They are compared as whole numbers, whose largest and smallest a warp finds in one instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_forms.order import float_of, ordered
from kernels.triton_forms.overlap import LAUNCH, after_previous
from kernels.triton_forms.parts import bias_of, sum_parts_of_row


def choose_experts(
    parts: torch.Tensor, bias: torch.Tensor | None, top_k: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chosen experts' ids, int64, and shares, float32, both [T, top_k], best first.

    parts: the logits' partial sums, float32 [S, T, E]; bias: [E]. Of equal logits the lowest expert is first.
    `normalize`: the shares of the chosen add up to 1; else they are those of a softmax over all.
    """
    parts = parts.contiguous()
    num_parts, rows, experts = parts.shape
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=parts.device)
    shares = torch.empty(rows, top_k, dtype=torch.float32, device=parts.device)
    if rows:
        _choose_experts[(rows,)](
            parts,
            bias,
            ids,
            shares,
            rows,
            experts,
            NUM_PARTS=num_parts,
            TOP_K=top_k,
            TOP_K_BLOCK=triton.next_power_of_2(top_k),
            NORMALIZE=normalize,
            BLOCK=triton.next_power_of_2(experts),
            num_warps=1,
            maxnreg=128,  # said, so that the compiler does not load in turns to get by with fewer
            **LAUNCH,
        )
    return ids, shares


@triton.jit(do_not_specialize=["rows"])
def _choose_experts(
    parts,
    bias,
    ids,
    shares,
    rows,
    experts,
    NUM_PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, TOP_K_BLOCK)
    own_bias = bias_of(bias, expert, expert < experts)
    after_previous()
    logits = sum_parts_of_row(parts, row, rows, experts, expert, expert < experts, NUM_PARTS) + own_bias
    rest = tl.where(expert < experts, ordered(logits), -2147483648)
    best = float_of(tl.max(rest, 0))
    total = tl.sum(tl.where(expert < experts, tl.exp(logits - best), 0.0), 0)
    chosen = tl.zeros((TOP_K_BLOCK,), tl.int32)
    weights = tl.zeros((TOP_K_BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        largest = tl.max(rest, 0)
        first = tl.min(tl.where(rest == largest, expert, BLOCK), 0)
        chosen = tl.where(rank == place, first, chosen)
        weights = tl.where(rank == place, tl.exp(float_of(largest) - best), weights)
        rest = tl.where(expert == first, -2147483648, rest)
    if NORMALIZE:
        total = tl.sum(weights, 0)
    inside = rank < TOP_K
    tl.store(ids + row * TOP_K + rank, chosen.to(tl.int64), mask=inside)
    tl.store(shares + row * TOP_K + rank, weights / total, mask=inside)
