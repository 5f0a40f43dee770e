"""Acceptance of chains: a program a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.acceptance import Endings

MOST_ROWS = 32


def accept(
    chosen: torch.Tensor, drafts: torch.Tensor, starts: torch.Tensor, endings: Endings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The Triton form of `kernels.acceptance.accept`, for chains of up to MOST_ROWS rows."""
    chains, num_tokens = endings.tokens.shape
    out = torch.empty(3, chains, dtype=torch.int32, device=chosen.device)
    if chains:
        _accept[(chains,)](
            chosen,
            drafts,
            starts,
            endings.tokens,
            endings.generated,
            endings.length,
            endings.min_new,
            endings.max_new,
            endings.max_length,
            out,
            chains,
            TOKENS=num_tokens,
            TOKENS_BLOCK=triton.next_power_of_2(max(num_tokens, 1)),
            ROWS=MOST_ROWS,
            num_warps=1,
        )
    return out[0], out[1], out[2]


@triton.jit
def _accept(
    chosen,
    drafts,
    starts,
    ending_tokens,
    all_generated,
    lengths,
    min_new,
    max_new,
    max_length,
    out,
    chains,
    TOKENS: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    chain = tl.program_id(0)
    start, end = tl.load(starts + chain), tl.load(starts + chain + 1)
    place, ending = tl.arange(0, ROWS), tl.arange(0, TOKENS_BLOCK)
    inside = start + place < end
    token = tl.load(chosen + start + place, mask=inside, other=-1)
    draft = tl.load(drafts + start + place, mask=inside, other=-1)
    generated = tl.load(all_generated + chain) + place + 1
    length = tl.load(lengths + chain) + place + 1

    endings = tl.load(ending_tokens + chain * TOKENS + ending, mask=ending < TOKENS, other=-1)
    is_ending = tl.max((token[:, None] == endings[None, :]).to(tl.int32), 1) > 0
    stops = is_ending & (token >= 0) & (generated > tl.load(min_new + chain))
    full = (generated == tl.load(max_new + chain)) | (length >= max_length)
    accepted = (token == draft) & (token >= 0)
    last = tl.min(tl.where(~accepted | stops | full, place, ROWS), 0)

    here = place == last
    num_accepted = last + tl.sum((here & accepted).to(tl.int32), 0)
    why = tl.where(stops, 1, tl.where(full, 2, 0))
    tl.store(out + chain, last + 1)
    tl.store(out + chains + chain, num_accepted)
    tl.store(out + 2 * chains + chain, tl.sum(tl.where(here, why, 0), 0))
