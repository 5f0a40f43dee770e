"""Programmatic dependent launch, with OUTRIDER_PDL=1, 2 or 3: a kernel starts while the one before it still runs.

Its programs then fetch what no kernel of a step writes, weights into the cache above all, and wait for the one before
to be complete. That saves the gap between two kernels, of which a step has hundreds, and uses the memory while small
kernels leave it idle. What makes it safe:

- Every kernel launched with LAUNCH or READER_LAUNCH waits, in every program, before it returns. So one that has waited
  knows all before it to be complete, not only the last.
- Nothing is written before that, since buffers are used again within a step; and nothing is read but weights, tables
  and a step's inputs: positions, page tables, seeds. Those are copied, or computed by an operation of PyTorch that
  another one follows, the look-up of embeddings; and that one starts when all before it is complete and can be seen.

With 1 every kernel lets the next one start at once, which does the same: many may be there at a time, each fetching
weights while the first still reads its own. With 2 the kernels that are bound by reading let the next one start when
they have read, so that what is fetched early is fetched while small kernels run. On an H200 neither made a layer
faster; readers that start beside another kernel may not be spread evenly. With 3 only small kernels start early.

Without any of this, too, small kernels can have more programs than they need, which fetch what a later kernel reads
(`ahead`).
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_MODE = os.environ.get("OUTRIDER_PDL", "0")
OVERLAPS = tl.constexpr(_MODE in ("1", "2", "3"))
# Whether kernels that are bound by reading start early, and fetch before they wait.
READERS_OVERLAP = tl.constexpr(_MODE in ("1", "2"))
_LINE = 128  # bytes
_LATE = tl.constexpr(_MODE == "2")
# For every launch of a kernel that waits for the previous one: of a small one, and of one that is bound by reading.
LAUNCH = {"launch_pdl": True} if OVERLAPS.value else {}
READER_LAUNCH = LAUNCH if READERS_OVERLAP.value else {}


def beginning(weight: torch.Tensor | None, megabytes: int) -> torch.Tensor | None:
    """The first rows of a weight [N, K], so many megabytes, to be fetched ahead; None where nothing is."""
    if weight is None or triton.knobs.runtime.interpret:
        return None
    rows = min(len(weight), megabytes * 2**20 // (weight.shape[1] * weight.element_size()))
    return weight[:rows] if rows else None


def programs_ahead(ahead: torch.Tensor | None, lines: int) -> int:
    """How many programs fetch `lines` lines each of contiguous memory; what is left over is not fetched."""
    return 0 if ahead is None else ahead.numel() * ahead.element_size() // (lines * _LINE)


@triton.jit
def after_previous():
    """Lets the next kernel start, and waits for those before this one. In every program, before any return."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def then_let_next_start():
    """`after_previous` the other way round: the next kernel may read early what kernels before this one wrote."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def reader_after_previous():
    """`after_previous` of a kernel that is bound by reading, and calls `reader_has_read` afterwards."""
    if OVERLAPS:
        if not _LATE:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def reader_has_read():
    """Lets the next kernel start, where that has not been done yet."""
    if _LATE:
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(ahead, program, LINES: tl.constexpr):
    """All that one of `programs_ahead` does."""
    # Four lines an instruction, which names what it fetches: of a line that only is named, half may come.
    piece = (program.to(tl.int64) * (LINES // 4) + tl.arange(0, LINES // 4)) * 512
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; // dummy $0",
        "=r,l",
        [ahead.to(tl.int64) + piece],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    after_previous()


@triton.jit
def prefetch(pointers):
    """Brings the lines of 128 bytes at `pointers`, of any shape, into the L2 cache; they must lie in global memory.

    One instruction an element: a tensor of fewer elements than the program has threads is fetched several times. Not
    for the interpreter.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
