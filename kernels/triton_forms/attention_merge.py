"""Partial results of attention over splits of the keys, taken in one after the other, in the order of the splits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_forms.attention_tile import begin_softmax, take_split_in
from kernels.triton_forms.overlap import LAUNCH, after_previous

LOADED, WARPS = 16, 1  # splits that are loaded together, and a program's warps: no bit depends on them


def merge_splits(
    parts: torch.Tensor,
    stats: torch.Tensor,
    sinks: torch.Tensor | None,
    positions: torch.Tensor,
    span: int,
    out: torch.Tensor,
) -> None:
    """Stores the attention output in out [T, nq, d].

    parts: float32 [T, nq, splits, d], sums of values by weight. stats: float32 [T, nq, splits, 2], the largest logits,
    in base 2, and sums of weights relative to them. span: keys of a split; those behind a row's position are not read.
    """
    rows, heads, splits, width = parts.shape
    _merge_splits[(rows, heads)](
        parts,
        stats,
        sinks,
        positions,
        out,
        splits,
        HEADS=heads,
        WIDTH=width,
        BLOCK=max(16, triton.next_power_of_2(width)),
        SPAN=span,
        LOADED=LOADED,
        num_warps=WARPS,
        maxnreg=168,  # said, so that the compiler does not load in turns to get by with fewer
        **LAUNCH,
    )


@triton.jit(do_not_specialize=["splits"])
def _merge_splits(
    parts,
    stats,
    sinks,
    positions,
    out,
    splits,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    LOADED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    own_splits = tl.load(positions + row) // SPAN + 1  # an input of the step, read before the wait
    largest, total = begin_softmax(sinks, head, head < HEADS)
    after_previous()
    vector = row.to(tl.int64) * HEADS + head
    acc = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, own_splits, LOADED):
        loaded = ()
        for index in tl.static_range(LOADED):
            place, own = vector * splits + begin + index, begin + index < own_splits
            loaded += (  # type: ignore[assignment]
                tl.load(stats + place * 2, mask=own, other=float("-inf")),
                tl.load(stats + place * 2 + 1, mask=own, other=0.0),
                tl.load(parts + place * WIDTH + dims, mask=own & (dims < WIDTH), other=0.0),
            )
        for index in tl.static_range(LOADED):
            part_largest, part_total, part = loaded[3 * index], loaded[3 * index + 1], loaded[3 * index + 2]  # type: ignore[var-annotated]
            largest, total, acc = take_split_in(largest, total, acc, part_largest, part_total, part)
    tl.store(out + vector * WIDTH + dims, (acc / total).to(out.dtype.element_ty), mask=dims < WIDTH)
