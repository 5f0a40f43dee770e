"""Synthetic acceptance: a program a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.triton_forms.acceptance import MOST_ROWS

if TYPE_CHECKING:
    from kernels.scripted_acceptance import Script

_COUNTER = tl.constexpr(0x7FFFFFFF)  # kernels.scripted_acceptance.COUNTER


def scripted(
    chosen: torch.Tensor,
    drafts: torch.Tensor,
    starts: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    script: Script,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton form of `kernels.scripted_acceptance.scripted`, for chains of up to MOST_ROWS rows."""
    out = torch.stack((chosen, drafts))
    chains = starts.shape[0] - 1
    if chains:
        _scripted[(chains,)](
            drafts,
            starts,
            seeds,
            lengths,
            out,
            chosen.shape[0],
            ALWAYS=script.always,
            THRESHOLD=script.threshold,
            ROWS=MOST_ROWS,
            num_warps=1,
        )
    return out[0], out[1]


@triton.jit(do_not_specialize=["rows"])
def _scripted(
    drafts,
    starts,
    seeds,
    lengths,
    out,
    rows,
    ALWAYS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    ROWS: tl.constexpr,
):
    chain = tl.program_id(0)
    start, end = tl.load(starts + chain), tl.load(starts + chain + 1)
    place = tl.arange(0, ROWS)
    row, inside = start + place, start + place < end
    draft = tl.load(drafts + row, mask=inside, other=-1)
    zero = place * 0
    position = tl.load(lengths + chain).to(tl.int32)
    words, _, _, _ = tl.philox(tl.load(seeds + chain), zero + _COUNTER, zero + position, zero, zero)
    more = words.to(tl.uint32, bitcast=True).to(tl.int64) < THRESHOLD
    accepted = (place < ALWAYS + more.to(tl.int32)) & (row + 1 < end)
    tl.store(out + row, draft, mask=inside & accepted)
    tl.store(out + rows + row, -1, mask=inside & ~accepted)
