"""Programmatic dependent launch, with OUTRIDER_PDL=1: a kernel is set up while the one before it still runs.

Programs then start early, and wait for all that came before them as soon as they have started: nothing is read or
written before that. It saves the gap between two kernels, of which a step has hundreds. Not tried on a device yet.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAPS = tl.constexpr(os.environ.get("OUTRIDER_PDL") == "1")
# For every launch of a kernel that begins with `after_previous`.
LAUNCH = {"launch_pdl": True} if OVERLAPS.value else {}


@triton.jit
def after_previous():
    """Lets the next kernel be set up, and waits for those before this one. First in a kernel, before any return."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
