"""Programmatic dependent launch: small kernels start early, when every program of the one before them runs or has run.

That saves the gap between two kernels, of which a step has hundreds. What makes it safe:

- A kernel that is launched with LAUNCH waits in every program, by `after_previous`, before it returns, before it
  writes anything, and before it reads anything that a kernel of a step writes. Earlier it may read weights, tables,
  and a step's inputs: positions, page tables, seeds.
- Its wait is for the kernel before it to be complete, and that one, where it started early, has itself waited for the
  one before: so all are complete, and what they wrote can be seen.
- Without LAUNCH a kernel starts when all before it are complete. So what runs beside a kernel that has not waited yet
  goes back to the last one that was launched so, and no further: an input that is computed is safe where an operation
  of PyTorch follows, which the look-up of embeddings does.

Those that are bound by reading are launched without: they may be spread unevenly beside another one. They call
`after_previous`, too, where a small one follows: it lets that one start, and finds nothing to wait for.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def _starts_early() -> bool:
    """Whether all devices can: those of compute capability 9.0 and above. OUTRIDER_PDL=0 says no.

    Without a device nothing starts, and OUTRIDER_PDL=1 says that kernels are compiled for one that can.
    """
    setting = os.environ.get("OUTRIDER_PDL", "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"OUTRIDER_PDL: expected 0 or 1, found {setting!r}")
    if setting == "0" or triton.knobs.runtime.interpret:
        return False
    if not torch.cuda.is_available():
        return setting == "1"
    return min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))) >= (9, 0)


OVERLAPS = tl.constexpr(_starts_early())
# For every launch of a small kernel.
LAUNCH = {"launch_pdl": True} if OVERLAPS.value else {}


@triton.jit
def after_previous():
    """Lets the next kernel start, and waits for those before this one. In every program, before any return."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
