"""The Triton forms: what CUDA tensors take where Triton is installed.

Only `wanted` may be imported without Triton; each other file is imported when its operation is first asked for.

Tests compare all of it with the PyTorch forms, in Triton's interpreter (TRITON_INTERPRET=1) in float32 and float16, and
on a device in bfloat16, too; block sizes are those that were fastest on an H200 (docs/performance.md).

Rows keep their bits: a tile has the same shape for 1 to 8 rows, sums over inputs and keys are split at places that
depend on the shape of the weight and on absolute positions only, and their parts are added in one order. Kernels are
not specialised for the numbers that change with the batch, so that a row alone runs the code of rows together.
Partial sums have the form float32 [S, T, N] (`parts.py`), and whoever reads them next adds them up itself.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from kernels import native


def wanted(x: torch.Tensor) -> bool:
    """Whether an operation on `x` takes its Triton form: on CUDA, or in the interpreter when that form is forced."""
    form = native.current_form()
    return (form == "triton" or (x.is_cuda and form != "torch")) and _installed()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


if os.environ.get("TRITON_INTERPRET") == "1" and _installed():
    from kernels.triton_forms.interpreter import mend

    mend()
